"""The replica table that gateways route by: built from reports, told in deltas.

Each delta says what it follows on; an empty one now and then lets a gateway find a gap, for which
it asks with `greet`.
"""

from collections.abc import Iterable, Mapping, Sequence

from potluck.coordinator.membership import Member
from potluck.core import replicas
from potluck.core.ids import BootId, Digest, NodeId
from potluck.core.pricing import Price
from potluck.core.replicas import Replica, Table
from potluck.messages import membership, serving
from potluck.messages.membership import Heartbeat, Replicas, WireReplica
from potluck.ports.store import DeploymentRow

Key = tuple[NodeId, Digest]


class Publisher:
    def __init__(self, boot: BootId) -> None:
        self._table = Table(epoch=boot, offset=1)
        self._names: dict[NodeId, str] = {}

    @property
    def ready(self) -> int:
        return sum(_ready(replica) for replica in self._table.replicas.values())

    def refresh(
        self, members: Iterable[Member], deployments: Sequence[DeploymentRow]
    ) -> Replicas | None:
        """The delta to what was told before; None if nothing changed."""
        known = list(members)
        self._names = {member.row.id: member.row.name for member in known}
        after = built(known, deployments)
        changed, removed = replicas.difference(self._table.replicas, after)
        if not changed and not removed:
            return None
        follows = self._table.offset
        self._table = Table(self._table.epoch, follows + 1, after)
        return self._said(changed, removed, follows=follows, whole=False)

    def digest(self) -> Replicas:
        """Nothing new, but the offset: whoever missed something sees it."""
        return self._said((), (), follows=self._table.offset, whole=False)

    def whole(self) -> Replicas:
        rows = [self._table.replicas[key] for key in sorted(self._table.replicas)]
        return self._said(rows, (), follows=0, whole=True)

    def ready_of(self, digest: Digest) -> int:
        table = self._table.replicas
        return sum(_ready(table[key]) for key in table if key[1] == digest)

    def _said(
        self, changed: Sequence[Replica], removed: Sequence[Key], *, follows: int, whole: bool
    ) -> Replicas:
        return Replicas(
            epoch=self._table.epoch,
            follows=follows,
            offset=self._table.offset,
            whole=whole,
            changed=[_wire(one, self._names.get(one.node, "")) for one in changed],
            removed=list(removed),
        )


def built(members: Iterable[Member], deployments: Sequence[DeploymentRow]) -> Mapping[Key, Replica]:
    """What is served now: reported, deployed, and on a node that is not dead."""
    known = {row.digest: row for row in deployments if not row.retired}
    contexts = {
        digest: membership.manifest_decoder.decode(row.manifest).context_tokens
        for digest, row in known.items()
    }
    table = {}
    for member in members:
        if member.node.liveness == "dead" or member.report is None:
            continue
        for report in member.report.replicas:
            row = known.get(report.digest)
            if row is None:
                continue
            replica = Replica(
                node=member.row.id,
                model=row.model,
                digest=row.digest,
                # What gateways reserve money by is ours to say: a node may offer less, never more.
                context_tokens=min(report.context_tokens, contexts[row.digest]),
                slots=min(report.slots, row.slots),
                price=price_of(row),
                liveness=member.node.liveness,
                ready=report.state == "ready" and report.context_tokens > 0 and report.slots > 0,
            )
            table[replica.key] = replica
    return table


def served(report: Heartbeat | None) -> list[tuple[object, ...]]:
    """The part of a report that the table is built from."""
    reported = () if report is None else report.replicas
    return [(one.digest, one.state, one.slots, one.context_tokens) for one in reported]


def price_of(row: DeploymentRow) -> Price:
    return Price(
        input_micro_per_mtok=row.input_micro_per_mtok,
        output_micro_per_mtok=row.output_micro_per_mtok,
        fee_basis_points=row.fee_basis_points,
    )


def _ready(replica: Replica) -> bool:
    return replica.ready and replica.liveness == "alive"


def _wire(replica: Replica, name: str) -> WireReplica:
    return WireReplica(
        node=replica.node,
        node_name=name,
        model=replica.model,
        digest=replica.digest,
        context_tokens=replica.context_tokens,
        slots=replica.slots,
        price=serving.wire_price(replica.price),
        liveness=replica.liveness,
        ready=replica.ready,
    )
