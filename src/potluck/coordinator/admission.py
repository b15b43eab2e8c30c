"""The desk for nodes and gateways: hello and goodbye, liveness, deployments, the replica table."""

from potluck.coordinator import events, membership, reconcile, replicas
from potluck.coordinator.mail import Letter
from potluck.coordinator.membership import Member
from potluck.coordinator.state import State
from potluck.core import nodes, parameters
from potluck.core.ids import GatewayId, NodeId
from potluck.core.refusals import Refusal
from potluck.messages.membership import (
    Bye,
    Greet,
    Heartbeat,
    Hello,
    Regreet,
    Rehello,
    Replicas,
    Welcome,
)
from potluck.ports.store import Tx


class Admission:
    def __init__(self, state: State) -> None:
        self._state = state

    def ask_all(self) -> None:
        """After a start: who is there?"""
        for member in self._state.roster.members.values():
            self._state.mail.tell("rehello", member.row.id, Rehello())
        for gateway in self._state.roster.gateways:
            self._state.mail.tell("regreet", gateway, Regreet())

    def heard(self, gateway: GatewayId) -> None:
        """It spoke: about whatever, it lives. One we do not know, or forgot, is asked to greet."""
        state = self._state
        if not state.roster.hear(gateway, state.clock.now_ms()):
            state.mail.tell("regreet", gateway, Regreet())

    async def hello(self, letter: Letter, hello: Hello) -> Welcome:
        state = self._state
        row = membership.row_of_hello(hello, NodeId(letter.sender), state.clock.wall_ms())
        if isinstance(row, Refusal):
            state.mail.counters[row] += 1
            return Welcome(refusal=row)
        joined = await state.store.transact(lambda tx: membership.join(tx, row))
        if isinstance(joined, Refusal):
            return Welcome(refusal=joined)
        self._order(state.roster.admit(joined, letter.boot, state.clock.now_ms()))
        self.publish()
        return Welcome()

    async def heartbeat(self, letter: Letter, heartbeat: Heartbeat) -> None:
        state = self._state
        member = state.roster.members.get(NodeId(letter.sender))
        if member is None:
            state.mail.tell("rehello", letter.sender, Rehello())
            return
        report = membership.reported(heartbeat)
        if report is None or len(letter.body) > parameters.heartbeat_bytes_max:
            state.mail.counters[Refusal.MALFORMED] += 1
            return
        before, member.report = member.report, report
        changed = state.roster.apply(member, nodes.HeartbeatReceived(state.clock.now_ms()))
        self._order(member)
        # Most heartbeats change nothing, and building the table looks at every node.
        if changed or replicas.served(before) != replicas.served(heartbeat):
            self.publish()
        await self._keep([member] if changed else [], [member])

    async def bye(self, letter: Letter, _bye: Bye) -> None:
        state = self._state
        member = state.roster.members.get(NodeId(letter.sender))
        if member is None:
            return
        changed = state.roster.apply(member, nodes.LeftWillingly(state.clock.now_ms()))
        self.publish()
        row = membership.snapshot(member, state.clock.wall_ms(), state.clock.now_ms())

        def work(tx: Tx) -> None:
            tx.nodes.put(row)
            if changed:
                events.record(tx, state.clock.wall_ms(), "node_left", row.id, name=row.name)

        await state.store.transact(work)

    async def departed(self, identity: str) -> None:
        """The server saw its connection close. Another of the same node may be open already."""
        state = self._state
        member = state.roster.members.get(NodeId(identity))
        if member is None:
            return
        changed = state.roster.apply(member, nodes.ConnectionClosed(state.clock.now_ms()))
        state.mail.tell("rehello", identity, Rehello())
        if changed:
            self.publish()
            await self._keep([member], [member])

    async def greet(self, letter: Letter, greet: Greet) -> Replicas | None:
        state = self._state
        row = membership.row_of_greet(
            greet, GatewayId(letter.sender), letter.boot, state.clock.wall_ms()
        )
        if row is None:
            state.mail.counters[Refusal.FORGED] += 1
            return None
        await state.store.transact(lambda tx: membership.greet(tx, row))
        state.roster.know(row, state.clock.now_ms())
        whole = state.publisher.whole()
        if letter.reply:
            return whole
        state.mail.tell("replicas", row.id, whole)
        return None

    async def judge(self) -> None:
        """Each second: who fell silent."""
        state = self._state
        changed, turned = state.watch.tick(state.clock.now_ms(), state.mail.connected)
        if changed:
            self.publish()
        if changed or turned:
            await self._keep(changed, changed, frozen=state.watch.frozen if turned else None)

    async def reconcile(self) -> None:
        """Each period: what each node should serve, said again where it differs."""
        state = self._state
        await self.load_deployments()
        for member in list(state.roster.members.values()):
            self._order(member)
        self.publish()

    async def load_deployments(self) -> None:
        state = self._state
        state.deployments = await state.store.transact(lambda tx: tx.deployments.list())
        state.deploy = reconcile.wanted(state.deployments)

    def publish(self) -> None:
        """Tells gateways what changed in the replica table, if anything did."""
        state = self._state
        delta = state.publisher.refresh(state.roster.members.values(), state.deployments)
        if delta is not None:
            self._tell_gateways(delta)

    async def digest(self) -> None:
        state = self._state
        self._tell_gateways(state.publisher.digest())
        for gateway in state.roster.silent_gateways(state.clock.now_ms()):
            state.mail.tell("regreet", gateway, Regreet())

    def _tell_gateways(self, body: Replicas) -> None:
        for gateway in self._state.roster.gateways:
            self._state.mail.tell("replicas", gateway, body)

    def _order(self, member: Member) -> None:
        if reconcile.differs(member, self._state.deploy):
            self._state.mail.tell("deploy", member.row.id, self._state.deploy)

    async def _keep(
        self, changed: list[Member], heard: list[Member], frozen: bool | None = None
    ) -> None:
        """Writes members to SQL, with an event for each of `changed`."""
        state = self._state
        wall_ms, now_ms = state.clock.wall_ms(), state.clock.now_ms()
        turned = {member.row.id for member in changed}
        rows = [membership.snapshot(member, wall_ms, now_ms) for member in heard]

        def work(tx: Tx) -> None:
            if frozen is not None:
                kind: events.Kind = "evictions_frozen" if frozen else "evictions_resumed"
                events.record(tx, wall_ms, kind, state.mail.id)
            for row in rows:
                membership.keep(tx, row, row.id in turned, wall_ms)

        await state.store.transact(work)
