"""Penstock on Ray: `serve run penstock.deploy.ray:app`."""

from penstock.deploy.ray.application import app

__all__ = ["app"]
