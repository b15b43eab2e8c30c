"""The replica table of a gateway: which node serves which model now.

It follows the coordinator by offset. A change that does not follow on from what is held is a gap:
nothing is applied, and the whole table is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from potluck.core.ids import Digest, NodeId
from potluck.core.nodes import Liveness
from potluck.core.pricing import Price


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One loaded copy of a model on one node."""

    node: NodeId
    model: str
    """The name requesters use."""
    digest: Digest
    context_tokens: int
    slots: int
    price: Price
    liveness: Liveness = "alive"
    ready: bool = True

    @property
    def usable(self) -> bool:
        """Whether it could serve now."""
        return self.ready and self.liveness == "alive"

    @property
    def key(self) -> tuple[NodeId, Digest]:
        return (self.node, self.digest)


@dataclass(frozen=True)
class Table:
    epoch: str = ""
    """Names the coordinator's counting: an offset means nothing under another epoch."""
    offset: int = 0
    replicas: Mapping[tuple[NodeId, Digest], Replica] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Delta:
    epoch: str
    follows: int
    """The offset this delta builds on."""
    offset: int
    changed: tuple[Replica, ...] = ()
    removed: tuple[tuple[NodeId, Digest], ...] = ()


@dataclass(frozen=True)
class Gap:
    """The whole table must be asked for."""


def whole(epoch: str, offset: int, replicas: tuple[Replica, ...]) -> Table:
    return Table(epoch, offset, {replica.key: replica for replica in replicas})


def apply(table: Table, delta: Delta) -> Table | Gap:
    """The table after the delta; unchanged for one already applied; a gap otherwise."""
    if delta.epoch != table.epoch:
        return Gap()
    if delta.offset <= table.offset:
        return table
    if delta.follows != table.offset:
        return Gap()
    replicas = {**table.replicas, **{replica.key: replica for replica in delta.changed}}
    for key in delta.removed:
        replicas.pop(key, None)
    return Table(table.epoch, delta.offset, replicas)


def difference(
    before: Mapping[tuple[NodeId, Digest], Replica], after: Mapping[tuple[NodeId, Digest], Replica]
) -> tuple[tuple[Replica, ...], tuple[tuple[NodeId, Digest], ...]]:
    """What changed and what went, sorted so that equal inputs give equal deltas."""
    changed = [after[key] for key in sorted(after) if before.get(key) != after[key]]
    removed = sorted(key for key in before if key not in after)
    return tuple(changed), tuple(removed)
