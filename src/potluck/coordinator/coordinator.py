"""The coordinator: opens what arrives, gives it to its desk, and keeps the periodic rounds going.

Rule: nothing that a peer sends disturbs anybody else. What is malformed, foreign or seen before is
dropped and counted; a handler that fails is logged, and its asker is told.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgspec

from potluck.coordinator import accounting, audit, expiry
from potluck.coordinator.accounting import Accounting
from potluck.coordinator.admission import Admission
from potluck.coordinator.liveness import Watch
from potluck.coordinator.mail import QUEUE, Letter, Mail
from potluck.coordinator.membership import Roster
from potluck.coordinator.outbox import Outbox
from potluck.coordinator.replicas import Publisher
from potluck.coordinator.state import State
from potluck.core import parameters
from potluck.core.ids import ANY_COORDINATOR, BootId, CoordinatorId, GatewayId
from potluck.core.refusals import Refusal
from potluck.messages import envelope, membership, money, queries, subjects
from potluck.messages.envelope import Body
from potluck.messages.membership import Welcome
from potluck.ports.bus import Bus, Delivery, Subscription
from potluck.ports.clock import Clock
from potluck.ports.ids import Ids
from potluck.ports.keys import Verifier
from potluck.ports.store import Store, StoreFullError, StoreUnavailableError, Tx

log = logging.getLogger(__name__)

Handle = Callable[[Letter, Any], Awaitable[Body | None]]
_GATEWAY: Final = "gw_"
_NODE: Final = "node_"


@dataclass(frozen=True, slots=True)
class Route:
    """Who may send a verb, how it is read, who handles it, and how its asker is refused."""

    senders: str
    decoder: Any
    handle: Handle
    refuse: Callable[[Refusal], Body] | None = None


class Coordinator:
    def __init__(
        self, *, pool: str, id: CoordinatorId, store: Store, bus: Bus, clock: Clock,
        ids: Ids, verifier: Verifier,
    ) -> None:  # fmt: skip
        boot = BootId(ids.ulid())
        self._bus = bus
        self._mail = Mail(pool=pool, id=id, boot=boot, bus=bus)
        self.counters = self._mail.counters
        """What was dropped or refused, by its cause."""
        self._counted = self.counters.copy()
        roster = Roster()
        self._state = State(
            mail=self._mail,
            store=store,
            clock=clock,
            ids=ids,
            verifier=verifier,
            roster=roster,
            watch=Watch(roster, 0),
            publisher=Publisher(boot),
        )
        self._admission = Admission(self._state)
        self._outbox = Outbox(store, self._mail)
        self._routes = _routes(Accounting(self._state), self._admission)
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._rounds: list[asyncio.Task[None]] = []
        self._apart_ms = 0
        """The wall clock less our own, as far as holds know."""

    async def start(self) -> None:
        """Loads, listens, tells what a crash left untold, and asks who is there."""
        state, bus = self._state, self._bus
        await self._admission.load_deployments()
        nodes, gateways = await state.store.transact(
            lambda tx: (tx.nodes.list(), tx.gateways.list())
        )
        now_ms = state.clock.now_ms()
        state.roster.load(nodes, gateways, now_ms)
        state.watch = Watch(state.roster, now_ms)
        self._admission.publish()
        for verb in self._routes:
            for receiver, queue in ((ANY_COORDINATOR, QUEUE), (self._mail.id, "")):
                subject = subjects.received_by(self._mail.pool, receiver, verb)
                self._subscriptions.append(await bus.subscribe(subject, self._deliver, queue))
        self._subscriptions.append(await bus.subscribe_departures(self._depart))
        self._begin_rounds()
        self._admission.ask_all()

    async def stop(self) -> None:
        """Ends the rounds, lets what is in hand finish, and tells what it recorded."""
        for subscription in self._subscriptions:
            await subscription.close()
        for task in self._rounds:
            task.cancel()
        await asyncio.gather(*self._rounds, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._outbox.flush()
            await self._outbox.flush()  # Removes what the first has told.
        except (StoreUnavailableError, StoreFullError) as error:
            log.warning("the outbox stays for the next start: %s", error)

    def _begin_rounds(self) -> None:
        every: tuple[tuple[int, Callable[[], Awaitable[None]]], ...] = (
            (parameters.liveness_tick_ms, self._admission.judge),
            (parameters.reconcile_ms, self._admission.reconcile),
            (parameters.replica_digest_ms, self._admission.digest),
            (parameters.books_tick_ms, self._look),
        )
        rounds = [self._round(period_ms, work) for period_ms, work in every]
        rounds += [self._expire(), self._tell()]
        self._rounds = [asyncio.create_task(one) for one in rounds]

    async def _round(self, period_ms: int, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._guarded(work)
            await self._state.clock.sleep_ms(period_ms)

    async def _expire(self) -> None:
        """Only after a while of undisturbed listening, in which nodes could repeat receipts."""
        clock = self._state.clock
        since_ms = clock.now_ms()
        self._apart_ms = clock.wall_ms() - since_ms
        while True:
            slept_from_ms = clock.now_ms()
            await clock.sleep_ms(parameters.expiry_tick_ms)
            late_ms = clock.now_ms() - slept_from_ms - parameters.expiry_tick_ms
            jump_ms = clock.wall_ms() - clock.now_ms() - self._apart_ms
            if max(late_ms, jump_ms) >= parameters.stall_ms_min or not self._mail.connected:
                since_ms = clock.now_ms()
            rested = clock.now_ms() - since_ms >= parameters.expiry_first_ms
            await self._guarded(lambda: self._lapse(jump_ms, rested))  # noqa: B023

    async def _lapse(self, jump_ms: int, rested: bool) -> None:
        """`jump_ms`: so much more passed on the wall than on our own clock. Then the machine slept,
        or its clock was set, and nobody's time to renew or to report has passed."""
        now_ms = self._state.clock.wall_ms()

        def work(tx: Tx) -> None:
            if jump_ms >= parameters.stall_ms_min:
                tx.holds.postpone(jump_ms)
            if rested:
                expiry.expire(tx, now_ms)
                expiry.tidy(tx, now_ms)

        await self._state.store.transact(work)
        self._apart_ms += jump_ms

    async def _look(self) -> None:
        """Reads over all accounts and open holds, so not at every question."""
        self._state.books_balance = await self._state.store.transact(audit.books_balance)
        if not self._state.books_balance:
            log.error("the books do not balance")
        if self.counters != self._counted:
            log.info(
                "since the last look, dropped, refused or waiting: %s",
                dict(self.counters - self._counted),
            )
            self._counted = self.counters.copy()

    async def _tell(self) -> None:
        full = self._state.outbox_full
        while True:
            full.clear()
            await self._guarded(self._outbox.flush)
            try:
                async with asyncio.timeout(parameters.outbox_tick_ms / 1000):
                    await full.wait()
            except TimeoutError:
                continue

    async def _guarded(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except (StoreUnavailableError, StoreFullError) as error:
            self.counters["store"] += 1
            log.warning("a round was skipped: %s", error)
        except Exception:
            self.counters["failed"] += 1
            log.exception("a round failed")

    def _deliver(self, delivery: Delivery) -> None:
        route = self._routes[subjects.verb_of(delivery.subject)]
        sender = subjects.sender_of(delivery.subject)
        if not sender.startswith(route.senders):
            self._drop(route, delivery, Refusal.FORBIDDEN)
            return
        try:
            letter = self._mail.open(delivery)
            body = route.decoder.decode(letter.body)
        except envelope.ReplayedError:
            # Not answered: its first copy is, and this answer might overtake that one.
            self.counters[Refusal.REPLAYED] += 1
        except envelope.VersionError:
            self._drop(route, delivery, Refusal.WIRE_VERSION)
        except (envelope.MalformedError, msgspec.MsgspecError):
            self._drop(route, delivery, Refusal.MALFORMED)
        else:
            if len(self._tasks) >= parameters.coordinator_tasks_max:
                self._drop(route, delivery, Refusal.OVERLOADED)
                return
            if route.senders == _GATEWAY and letter.verb != "greet":
                self._admission.heard(GatewayId(sender))
            self._spawn(self._handle(route, letter, body))

    def _drop(self, route: Route, delivery: Delivery, refusal: Refusal) -> None:
        self.counters[refusal] += 1
        if delivery.reply and route.refuse is not None:
            sender = subjects.sender_of(delivery.subject)
            self._mail.answer(sender, delivery.reply, route.refuse(refusal))

    async def _handle(self, route: Route, letter: Letter, body: Any) -> None:
        answer: Body | None
        try:
            answer = await route.handle(letter, body)
        except StoreFullError:
            answer = self._failed(route, Refusal.STORE_FULL)
        except StoreUnavailableError:
            answer = self._failed(route, Refusal.COORDINATOR_UNAVAILABLE)
        except Exception:
            log.exception("%s from %s failed", letter.verb, letter.sender)
            answer = self._failed(route, Refusal.INTERNAL)
        if answer is not None:
            self._mail.answer(letter.sender, letter.reply, answer)

    def _failed(self, route: Route, refusal: Refusal) -> Body | None:
        self.counters[refusal] += 1
        return None if route.refuse is None else route.refuse(refusal)

    def _depart(self, identity: str) -> None:
        if identity.startswith(_NODE):
            self._spawn(self._guarded(lambda: self._admission.departed(identity)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _routes(money_desk: Accounting, door: Admission) -> dict[str, Route]:
    hold, answer = accounting.refused_hold, accounting.refused_answer
    routes: dict[str, Route] = {
        "greet": Route(_GATEWAY, membership.greet_decoder, door.greet),
        "hold": Route(_GATEWAY, money.hold_request_decoder, money_desk.hold, hold),
        "renew": Route(_GATEWAY, money.hold_renewal_decoder, money_desk.renew, hold),
        "release": Route(_GATEWAY, money.hold_release_decoder, money_desk.release),
        "countersign": Route(_GATEWAY, money.countersignature_decoder, money_desk.countersign),
        "query": Route(_GATEWAY, queries.query_decoder, money_desk.query, answer),
        "command": Route(_GATEWAY, queries.command_decoder, money_desk.command, answer),
        "hello": Route(_NODE, membership.hello_decoder, door.hello, _unwelcome),
        "heartbeat": Route(_NODE, membership.heartbeat_decoder, door.heartbeat),
        "bye": Route(_NODE, membership.bye_decoder, door.bye),
        "receipts": Route(_NODE, money.receipt_batch_decoder, money_desk.receipts),
    }
    assert set(routes) <= set(get_args(subjects.Verb))
    return routes


def _unwelcome(refusal: Refusal) -> Welcome:
    return Welcome(refusal=refusal)
