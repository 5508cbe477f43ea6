"""Policies, which order requests: one class per file. `registry.py` has their names.

One of your own derives from `Policy`, and sees a `View`.
"""

from penstock.parts.policies.scheduler.order import Order
from penstock.parts.policies.scheduler.policy import Policy
from penstock.parts.policies.scheduler.view import View

__all__ = ["PARTS", "Policy", "View"]

PARTS = (Order,)
