"""Which node serves which model now, followed by offset; a gap asks for the whole again."""

from collections.abc import Sequence

from potluck.core import replicas
from potluck.core.pricing import Price
from potluck.core.replicas import Replica
from potluck.messages.membership import Replicas, WireReplica


class ReplicaTable:
    def __init__(self) -> None:
        self._table = replicas.Table()
        self._by_model: dict[str, list[Replica]] = {}
        self.known = False
        """A coordinator has told us the whole at least once."""

    @property
    def usable(self) -> bool:
        """Whether any model could be served now."""
        return any(
            replica.ready and replica.liveness == "alive"
            for replica in self._table.replicas.values()
        )

    @property
    def models(self) -> Sequence[str]:
        return sorted(self._by_model)

    def serving(self, model: str) -> Sequence[Replica]:
        return self._by_model.get(model, ())

    def receive(self, told: Replicas) -> bool:
        """False: something was missed, and the whole must be asked for."""
        changed = tuple(_replica(one) for one in told.changed)
        if told.whole:
            if self.known and told.epoch == self._table.epoch and told.offset < self._table.offset:
                return True  # An answer that deltas have overtaken.
            self._keep(replicas.whole(told.epoch, told.offset, changed))
            self.known = True
            return True
        delta = replicas.Delta(
            epoch=told.epoch,
            follows=told.follows,
            offset=told.offset,
            changed=changed,
            removed=tuple(told.removed),
        )
        after = replicas.apply(self._table, delta)
        if isinstance(after, replicas.Gap):
            return False
        self._keep(after)
        return True

    def _keep(self, table: replicas.Table) -> None:
        self._table = table
        self._by_model = {}
        for key in sorted(table.replicas):
            replica = table.replicas[key]
            self._by_model.setdefault(replica.model, []).append(replica)


def _replica(wire: WireReplica) -> Replica:
    return Replica(
        node=wire.node,
        model=wire.model,
        digest=wire.digest,
        context_tokens=wire.context_tokens,
        slots=wire.slots,
        price=Price(
            input_micro_per_mtok=wire.price.input_micro_per_mtok,
            output_micro_per_mtok=wire.price.output_micro_per_mtok,
            fee_basis_points=wire.price.fee_basis_points,
        ),
        liveness=wire.liveness,
        ready=wire.ready,
    )
