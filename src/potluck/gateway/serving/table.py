"""Which node serves which model now, followed by offset; a gap asks for the whole again."""

from collections.abc import Sequence

from potluck.core import parameters, replicas
from potluck.core.replicas import Replica
from potluck.messages.membership import Replicas, WireReplica
from potluck.messages.serving import price_of


class ReplicaTable:
    def __init__(self) -> None:
        self._table = replicas.Table()
        self._by_model: dict[str, list[Replica]] = {}
        self.known = False
        """A coordinator has told us the whole at least once."""

    @property
    def usable(self) -> bool:
        """Whether any model could be served now."""
        return any(replica.usable for replica in self._table.replicas.values())

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
            if not _plausible(replica):
                continue
            self._by_model.setdefault(replica.model, []).append(replica)


def _plausible(replica: Replica) -> bool:
    """Its numbers come from a node, by way of a coordinator: money is reserved by them."""
    price = replica.price
    most_micro = parameters.plausible_price_micro_max
    return (
        1 <= replica.context_tokens <= parameters.plausible_context_tokens_max
        and 1 <= replica.slots <= parameters.plausible_slots_max
        and 0 <= price.input_micro_per_mtok <= most_micro
        and 0 <= price.output_micro_per_mtok <= most_micro
        and 0 <= price.fee_basis_points < 10_000
    )


def _replica(wire: WireReplica) -> Replica:
    return Replica(
        node=wire.node,
        model=wire.model,
        digest=wire.digest,
        context_tokens=wire.context_tokens,
        slots=wire.slots,
        price=price_of(wire.price),
        liveness=wire.liveness,
        ready=wire.ready,
    )
