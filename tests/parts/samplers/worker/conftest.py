"""The fixtures of the worker's tests."""

from tests.gpu_worker.conftest import checkpoint, one_thread

__all__ = ["checkpoint", "one_thread"]
