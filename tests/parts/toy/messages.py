"""What its processes tell each other."""

from penstock.ipc.messages import Message


class ToyLeft(Message, frozen=True):
    """To workers: so many requests have left."""

    num_requests: int


class ToyCounted(Message, frozen=True):
    """From workers: so many have left since the worker began."""

    num_requests: int


class ToyTold(Message, frozen=True):
    """To frontends: what the workers have counted."""

    num_requests: int


TO_WORKER = (ToyLeft,)
FROM_WORKER = (ToyCounted,)
TO_FRONTEND = (ToyTold,)
