"""The end-to-end tests' checkpoint serves here too."""

from tests.e2e.conftest import checkpoint

__all__ = ["checkpoint"]
