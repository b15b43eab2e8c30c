"""Which replica gets the next attempt: least loaded among those that can, ties by id."""

from collections.abc import Collection, Iterable, Mapping

from potluck.core.ids import NodeId
from potluck.core.refusals import Refusal
from potluck.core.replicas import Replica


def route(
    replicas: Iterable[Replica],
    model: str,
    in_flight: Mapping[NodeId, int],
    *,
    tried: Collection[NodeId] = (),
) -> Replica | Refusal:
    """The replica to ask; a loaded one still queues.

    `MODEL_NOT_FOUND` if no node serves the model at all, `NO_CAPACITY` if those that do are not
    ready, suspected, or were tried already.
    """
    best: Replica | None = None
    best_load = (0.0, NodeId(""))
    known = False
    for replica in replicas:
        if replica.model != model:
            continue
        known = True
        if not replica.usable or replica.node in tried:
            continue
        # For each slot, so that larger machines get more.
        load = (in_flight.get(replica.node, 0) / max(1, replica.slots), replica.node)
        if best is None or load < best_load:
            best, best_load = replica, load
    if best is not None:
        return best
    return Refusal.NO_CAPACITY if known else Refusal.MODEL_NOT_FOUND
