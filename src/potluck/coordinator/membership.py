"""Who belongs: nodes that said hello and gateways that greeted, as this coordinator knows them.

Liveness is measured on our own monotonic clock, so it lives in memory; SQL keeps what a restart
must find. A node found there gets the whole of `dead_after_ms` to speak again.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from potluck.coordinator import events
from potluck.core import ids, nodes, parameters
from potluck.core.ids import BootId, GatewayId, NodeId
from potluck.core.nodes import Liveness, Node
from potluck.core.refusals import Refusal
from potluck.messages import envelope, membership
from potluck.messages.membership import Greet, Heartbeat, Hello
from potluck.ports.store import GatewayRow, NodeRow, Tx


@dataclass(slots=True)
class Member:
    """Changed in place, on the loop alone."""

    row: NodeRow
    node: Node
    report: Heartbeat | None
    boot: BootId
    """The start that last said hello; empty if that was to an earlier start of ours."""


class Roster:
    def __init__(self) -> None:
        self.members: dict[NodeId, Member] = {}
        self.gateways: dict[GatewayId, GatewayRow] = {}
        """Those that are told things: the ones heard of late."""
        self.heard_ms: dict[GatewayId, int] = {}
        """When each of them last spoke, by our monotonic clock."""

    def load(
        self, nodes_kept: Sequence[NodeRow], gateways: Sequence[GatewayRow], now_ms: int
    ) -> None:
        """What SQL kept. `now_ms` is monotonic."""
        self.members = {row.id: _member(row, now_ms) for row in nodes_kept}
        self.gateways = {row.id: row for row in gateways}
        self.heard_ms = dict.fromkeys(self.gateways, now_ms)

    def hear(self, gateway: GatewayId, now_ms: int) -> bool:
        """It spoke. False: it must greet, so that we know it again."""
        if gateway not in self.gateways:
            return False
        self.heard_ms[gateway] = now_ms
        return True

    def silent_gateways(self, now_ms: int) -> list[GatewayId]:
        """Forgets gateways that are gone; those that may only be idle are to be asked."""
        for gateway, heard_ms in list(self.heard_ms.items()):
            if now_ms - heard_ms >= parameters.gateway_forgotten_ms:
                del self.heard_ms[gateway], self.gateways[gateway]
        return [
            gateway
            for gateway, heard_ms in self.heard_ms.items()
            if now_ms - heard_ms >= parameters.gateway_asked_ms
        ]

    def know(self, row: GatewayRow, now_ms: int) -> None:
        self.gateways[row.id] = row
        self.heard_ms[row.id] = now_ms

    def admit(self, row: NodeRow, boot: BootId, now_ms: int) -> Member:
        known = self.members.get(row.id)
        node = Node(id=row.id, liveness="alive", heard_ms=now_ms)
        # A node that started anew serves nothing yet, whatever its earlier start reported.
        same = known is not None and known.boot in ("", boot)
        report = known.report if known is not None and same else None
        member = Member(row=row, node=node, report=report, boot=boot)
        self.members[row.id] = member
        return member

    def apply(self, member: Member, event: nodes.Event) -> bool:
        """Whether its liveness changed."""
        member.node, effects = nodes.step(member.node, event)
        return bool(effects)


def row_of_hello(hello: Hello, sender: NodeId, wall_ms: int) -> NodeRow | Refusal:
    if ids.node_id(hello.public_key) != sender:
        return Refusal.FORGED
    if not _plausible(hello):
        return Refusal.MALFORMED
    return NodeRow(
        id=sender,
        name=hello.name,
        account=hello.account,
        public_key=hello.public_key,
        version=hello.version,
        tier=hello.tier,
        tier_reason=hello.tier_reason[: parameters.note_letters_max],
        inventory=envelope.encode(hello.inventory),
        report=b"",
        liveness="alive",
        heard_ms=wall_ms,
        closed_ms=None,
        joined_ms=wall_ms,
    )


def _plausible(hello: Hello) -> bool:
    has = hello.inventory
    kinds = [text for one in has.accelerators for text in (one.kind, one.name)]
    letters = (
        hello.tier, hello.version, hello.name, hello.account,
        has.hostname, has.os, has.arch, has.cpu_model, *kinds,
    )  # fmt: skip
    numbers = (
        has.cpu_cores, has.memory_bytes, has.disk_free_bytes,
        *(one.memory_bytes for one in has.accelerators),
    )  # fmt: skip
    return (
        bool(hello.name)
        and len(has.accelerators) <= parameters.accelerators_max
        and all(len(text) <= parameters.name_letters_max for text in letters)
        and all(0 <= number <= parameters.report_number_max for number in numbers)
    )


def reported(heartbeat: Heartbeat) -> Heartbeat | None:
    """What is kept of a heartbeat: long notes cut. None: it cannot be true, whatever it says."""
    known, most = heartbeat.replicas, parameters.report_number_max
    numbers = [
        heartbeat.memory_free_bytes, heartbeat.disk_free_bytes, heartbeat.receipts_waiting,
        *(one.slots for one in known), *(one.in_flight for one in known),
        *(one.context_tokens for one in known), *(one.fetched_bytes for one in known),
    ]  # fmt: skip
    if len(known) > parameters.deployments_per_node_max or not (
        0 <= heartbeat.cpu_percent <= most and -1 <= heartbeat.deploy_revision <= most
    ):
        return None
    if not all(0 <= number <= most for number in numbers):
        return None
    if any(len(one.digest) > parameters.name_letters_max for one in known):
        return None
    for one in known:
        one.detail = one.detail[: parameters.note_letters_max]
    return heartbeat


def join(tx: Tx, row: NodeRow) -> NodeRow | Refusal:
    """Records a hello. Its account must exist, and be one that can be paid."""
    account = tx.accounts.get(row.account)
    if account is None:
        return Refusal.ACCOUNT_NOT_FOUND
    if account.kind not in ("person", "provider"):
        return Refusal.FORBIDDEN
    known = tx.nodes.get(row.id)
    if known is None:
        events.record(tx, row.heard_ms, "node_joined", row.id, name=row.name)
    else:
        row = dataclasses.replace(row, joined_ms=known.joined_ms, report=known.report)
        if known.liveness != "alive":
            events.record(tx, row.heard_ms, "node_alive", row.id, name=row.name)
    tx.nodes.put(row)
    return row


def keep(tx: Tx, row: NodeRow, changed: bool, wall_ms: int) -> None:
    """Writes what is now known of a node, with an event if its liveness changed."""
    tx.nodes.put(row)
    if not changed:
        return
    match row.liveness:
        case "alive":
            events.record(tx, wall_ms, "node_alive", row.id, name=row.name)
        case "suspect":
            events.record(tx, wall_ms, "node_suspect", row.id, name=row.name)
        case "dead":
            events.record(tx, wall_ms, "node_dead", row.id, name=row.name)


def snapshot(member: Member, wall_ms: int, now_ms: int) -> NodeRow:
    """The member as SQL keeps it: moments turned from our monotonic clock to the wall's."""
    node = member.node
    return dataclasses.replace(
        member.row,
        liveness=node.liveness,
        report=member.row.report if member.report is None else envelope.encode(member.report),
        heard_ms=wall_ms - (now_ms - node.heard_ms),
        closed_ms=None if node.closed_ms is None else wall_ms - (now_ms - node.closed_ms),
    )


def row_of_greet(greet: Greet, sender: GatewayId, boot: BootId, wall_ms: int) -> GatewayRow | None:
    """None: the key is not the sender's."""
    if ids.gateway_id(greet.public_key) != sender:
        return None
    return GatewayRow(id=sender, public_key=greet.public_key, boot=boot, seen_ms=wall_ms)


def greet(tx: Tx, row: GatewayRow) -> None:
    known = tx.gateways.get(row.id)
    if known is None or known.boot != row.boot:
        events.record(tx, row.seen_ms, "gateway_joined", row.id, boot=row.boot)
    tx.gateways.put(row)


def _member(row: NodeRow, now_ms: int) -> Member:
    # Whatever closed or fell silent before our restart has all its time again, since we did not
    # hear what it said meanwhile. The dead stay dead until they speak.
    liveness: Liveness = "dead" if row.liveness == "dead" else "alive"
    try:
        report = membership.heartbeat_decoder.decode(row.report) if row.report else None
    except msgspec.MsgspecError:
        report = None
    node = Node(id=row.id, liveness=liveness, heard_ms=now_ms)
    return Member(row=row, node=node, report=report, boot=BootId(""))
