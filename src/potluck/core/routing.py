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
    """The replica to ask.

    `MODEL_NOT_FOUND` if no node serves the model at all, `NO_CAPACITY` if those that do are not
    ready, suspected, full, or were tried already.
    """
    serving = [replica for replica in replicas if replica.model == model]
    if not serving:
        return Refusal.MODEL_NOT_FOUND
    feasible = [replica for replica in serving if _usable(replica) and replica.node not in tried]
    if not feasible:
        return Refusal.NO_CAPACITY
    return min(feasible, key=lambda replica: (_load(replica, in_flight), replica.node))


def _usable(replica: Replica) -> bool:
    return replica.ready and replica.liveness == "alive"


def _load(replica: Replica, in_flight: Mapping[NodeId, int]) -> float:
    """Requests in flight for each slot, so that larger machines get more."""
    return in_flight.get(replica.node, 0) / max(1, replica.slots)
