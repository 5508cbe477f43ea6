"""Policies, which order requests: one class per file. `registry.py` has their names."""

from penstock.core.policies.policy import Policy
from penstock.core.policies.view import View

__all__ = ["Policy", "View"]
