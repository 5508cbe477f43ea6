"""What a worker is told to make beside its steps: grammars, and embeddings of images."""

from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.scheduling.trials import Order
from penstock.ipc.messages import DropEmbedding, DropGrammar

Orders = list[Order | DropGrammar | DropEmbedding]


def has_orders(scheduler: Scheduler) -> bool:
    """Whether `take_orders` may return some."""
    images = scheduler.images
    return bool(scheduler.is_on_trial or scheduler.grammars.messages or (images is not None and images.messages))


def take_orders(scheduler: Scheduler) -> Orders:
    """Return the orders for the worker since the last call; a suspect's comes when the worker does nothing else."""
    images, grammars = scheduler.images, scheduler.grammars
    orders: Orders = [*grammars.take_messages(), *([] if images is None else images.take_messages())]
    is_told = scheduler.is_on_trial and not scheduler.in_flight and scheduler.parts.num_in_making == 1
    if is_told and (order := scheduler.trials.take_order()) is not None:
        orders.append(order)
    return orders
