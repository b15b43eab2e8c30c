"""The gateway without sockets: admits requests, pays for them, sends them to nodes, counts.

Rule: nothing here waits for a disk or a coordinator while an account has money held and its key is
known.
"""

import asyncio
import logging
from typing import Final

import msgspec

import potluck
from potluck.core import parameters, pricing, routing
from potluck.core.ids import BootId, GatewayId, NodeId, RequestId, gateway_id
from potluck.core.refusals import Refusal
from potluck.core.replicas import Replica
from potluck.gateway.serving.asks import ChatAsk, Listener
from potluck.gateway.serving.conversations import Conversations
from potluck.gateway.serving.countersign import Countersigner
from potluck.gateway.serving.keys import Keys
from potluck.gateway.serving.limits import Limits
from potluck.gateway.serving.purses import Held, Purses
from potluck.gateway.serving.requests import Completion
from potluck.gateway.serving.speech import Speech
from potluck.gateway.serving.table import ReplicaTable
from potluck.messages import envelope, membership, money, queries, serving, subjects
from potluck.messages.membership import Greet
from potluck.messages.queries import Answer, Command, KeyRecord, Order, Query, What
from potluck.ports.bus import Bus, Delivery, Subscription
from potluck.ports.clock import Clock
from potluck.ports.ids import Ids
from potluck.ports.keys import Signer

_log = logging.getLogger(__name__)
_SENDERS: Final = {
    "frames": "node_",
    "settled": "co_",
    "replicas": "co_",
    "notice": "co_",
    "regreet": "co_",
}
"""Who may say what to a gateway: a node has no word in money, keys or the table."""
_COMPLAINTS_MAX: Final = 256


class Serving:
    def __init__(self, *, pool: str, signer: Signer, bus: Bus, clock: Clock, ids: Ids) -> None:
        self.me: GatewayId = gateway_id(signer.public_key)
        self.boot = BootId(ids.ulid())
        self.pool = pool
        self.clock = clock
        self.started_s = clock.wall_ms() // 1000
        self.ids = ids
        self._signer = signer
        self._bus = bus
        self._speech = Speech(pool, self.me, self.boot, bus, clock)
        self._guard = envelope.Guard()
        self.table = ReplicaTable()
        self.keys = Keys(self._speech, clock)
        self.purses = Purses(self._speech, clock, ids)
        self.limits = Limits()
        self._countersigner = Countersigner(self._speech, signer)
        self.conversations = Conversations(
            speech=self._speech,
            clock=clock,
            table=self.table,
            limits=self.limits,
            countersigner=self._countersigner,
        )
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._greeting: asyncio.Task[None] | None = None
        self._answers: asyncio.Task[bool] | None = None
        """Whether a coordinator answers, or answered a moment ago."""
        self._answers_ms = 0
        self._subscriptions: list[Subscription] = []
        self._complained: set[tuple[str, str]] = set()

    @property
    def ready(self) -> bool:
        return not self._stopping and self.table.known and self.table.usable

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def start(self) -> None:
        """Listens and begins to greet; returns before any coordinator has answered."""
        subject = subjects.received_by(self.pool, self.me)
        self._subscriptions.append(await self._bus.subscribe(subject, self._receive))
        self._greet_soon()
        self._tasks.append(asyncio.create_task(self._tick_forever()))

    async def stop(self, grace_ms: int = parameters.stop_grace_ms) -> None:
        """Refuses what is new, lets streams end for a grace, then cancels them."""
        self._stopping = True
        waited_ms = 0
        while len(self.conversations) and waited_ms < grace_ms:
            await self.clock.sleep_ms(parameters.acknowledge_every_ms)
            waited_ms += parameters.acknowledge_every_ms
        for completion in self.conversations.completions():
            self.conversations.give_up(
                completion, Refusal.SHUTTING_DOWN, "the gateway is shutting down"
            )
            completion.listener.wake()
        self.conversations.flush()
        self._countersigner.send(self.clock.now_ms())
        await self.purses.stop()
        for task in (*self._tasks, self._greeting, self._answers):
            if task is not None:
                task.cancel()
        for subscription in self._subscriptions:
            await subscription.close()

    # Admission

    def key_cached(self, digest: str) -> KeyRecord | Refusal | None:
        return self.keys.cached(digest, self.clock.now_ms())

    def submit_now(
        self, ask: ChatAsk, key: KeyRecord, listener: Listener
    ) -> Completion | Refusal | int:
        """Admit, grant and send, all in memory. A number: so much money must be asked for first."""
        if self._stopping:
            return Refusal.SHUTTING_DOWN
        if not self.table.known:
            return Refusal.COORDINATOR_UNAVAILABLE
        replica = routing.route(
            self.table.serving(ask.model), ask.model, self.conversations.in_flight
        )
        if isinstance(replica, Refusal):
            return replica
        now_ms = self.clock.now_ms()
        refusal = self.limits.take(key.id, ask.choices)
        if refusal is not None:
            return refusal
        begun = False
        try:
            draws = self._draw(ask, key, replica, now_ms)
            if isinstance(draws, int):
                return draws
            completion = Completion(self.conversations, ask, key, listener, now_ms)
            ask.sampling.max_tokens = _tokens_max(ask, replica.context_tokens)
            self.conversations.begin(completion, replica, draws, now_ms)
            begun = True
        finally:
            if not begun:
                for _ in range(ask.choices):
                    self.limits.give_back(key.id)
        return completion

    async def submit(
        self, ask: ChatAsk, key: KeyRecord, listener: Listener
    ) -> Completion | Refusal:
        """As `submit_now`, waiting for money where none is held. Others may take what came: then
        it is asked for again."""
        while True:
            result = self.submit_now(ask, key, listener)
            if not isinstance(result, int):
                return result
            refusal = await self.purses.fund(key.account, result)
            if refusal is not None:
                return refusal

    def _draw(
        self, ask: ChatAsk, key: KeyRecord, replica: Replica, now_ms: int
    ) -> list[tuple[RequestId, Held, int]] | int:
        """A grant for each choice; all of them or, as a number, what is missing for all."""
        tokens_max = _tokens_max(ask, replica.context_tokens)
        draws: list[tuple[RequestId, Held, int]] = []
        for index in range(ask.choices):
            max_micro = pricing.cost_max_micro(
                replica.price,
                prompt_bytes=len(ask.messages) if index == 0 else 0,
                completion_tokens_max=tokens_max,
            )
            held = self.purses.draw(key.account, max_micro, now_ms)
            if held is None:
                for request, drawn, drawn_micro in draws:
                    drawn.close((request, 1), max_micro=drawn_micro, used_micro=0)
                return max_micro * (ask.choices - index) + sum(micro for _, _, micro in draws)
            draws.append((RequestId("req_" + self.ids.ulid()), held, max_micro))
        return draws

    # Coordinators

    async def query(
        self, what: What, args: dict[str, str], at_least_offset: int = 0
    ) -> Answer | None:
        """None: no coordinator answered."""
        question = Query(what=what, args=args, at_least_offset=at_least_offset)
        return _answer(await self._speech.ask("query", question, parameters.query_timeout_ms))

    async def coordinator_answers(self) -> bool:
        """Asked at most once each `readiness_kept_ms`, whoever wants to know: about a key that is
        none, which costs the coordinator one look."""
        now_ms = self.clock.now_ms()
        if self._answers is None or now_ms - self._answers_ms >= parameters.readiness_kept_ms:
            self._answers_ms = now_ms
            self._answers = asyncio.create_task(self._ask_anything())
        return await asyncio.shield(self._answers)

    async def _ask_anything(self) -> bool:
        return await self.query("key", {"hash": "0" * 64}) is not None

    async def command(
        self, order: Order, args: dict[str, str], command: str | None = None
    ) -> Answer | None:
        """Repeated under the same id until answered. None: whether it was done is not known; who
        gives the same id again learns it."""
        body = Command(id=command or "cmd_" + self.ids.ulid(), order=order, args=args)
        return _answer(await self._speech.ask_again("command", body, parameters.query_timeout_ms))

    def _receive(self, delivery: Delivery) -> None:
        sender = subjects.sender_of(delivery.subject)
        verb = subjects.verb_of(delivery.subject)
        allowed = _SENDERS.get(verb)
        if allowed is None or not sender.startswith(allowed):
            self._complain(sender, verb, "it may not")
            return
        try:
            body = self._guard.open(sender, delivery.payload)
            if verb == "frames":
                words = serving.frames_decoder.decode(body).items
                self.conversations.receive(NodeId(sender), words)
            else:
                self._told(verb, body)
        except (envelope.MalformedError, msgspec.DecodeError) as error:
            self._complain(sender, verb, str(error))
        except envelope.ReplayedError:
            return

    def _complain(self, sender: str, verb: str, why: str) -> None:
        """Once for each sender and verb: who says nonsense must not fill the disk either."""
        if (sender, verb) not in self._complained and len(self._complained) < _COMPLAINTS_MAX:
            self._complained.add((sender, verb))
            _log.warning("%s said %r: %s", sender, verb, why)

    def _told(self, verb: str, body: memoryview) -> None:
        match verb:
            case "settled":
                told = money.settled_decoder.decode(body)
                self.purses.settled(told, self.conversations.is_live)
                for item in told.items:
                    if item.countersigned:
                        self._countersigner.stored(item.request, item.attempt)
            case "replicas":
                if not self.table.receive(membership.replicas_decoder.decode(body)):
                    self._greet_soon()
            case "notice":
                notice = membership.notice_decoder.decode(body)
                if notice.kind == "key":
                    self.keys.drop(notice.name)
            case "regreet":
                self._greet_soon()

    def _greet_soon(self) -> None:
        if self._greeting is None or self._greeting.done():
            self._greeting = asyncio.create_task(self._greet())

    async def _greet(self) -> None:
        """Until a coordinator has told the whole table."""
        greet = Greet(public_key=self._signer.public_key, version=potluck.__version__)
        while True:
            try:
                body = await self._speech.ask("greet", greet, parameters.query_timeout_ms)
                if body is not None and self._learn(body):
                    return
            except Exception:
                _log.exception("a greeting failed")
            await self.clock.sleep_ms(parameters.greet_repeat_ms)

    def _learn(self, body: memoryview) -> bool:
        try:
            return self.table.receive(membership.replicas_decoder.decode(body))
        except msgspec.DecodeError:
            return False

    async def _tick_forever(self) -> None:
        ticked_ms = countersigned_ms = self.clock.now_ms()
        while True:
            await self.clock.sleep_ms(parameters.acknowledge_every_ms)
            now_ms = self.clock.now_ms()
            late_ms = now_ms - ticked_ms - parameters.acknowledge_every_ms
            ticked_ms = now_ms
            try:
                if late_ms > parameters.silence_timeout_ms // 2:
                    # This process stood still; what was said meanwhile is still to be read.
                    self.conversations.forgive(late_ms)
                self.conversations.tick(now_ms)
                if now_ms - countersigned_ms >= parameters.countersign_tick_ms:
                    countersigned_ms = now_ms
                    self._countersigner.send(now_ms)
                    self.purses.tick(now_ms)
            except Exception:
                # One bad request must not stop the clock of all others.
                _log.exception("a tick failed")


def _tokens_max(ask: ChatAsk, context_tokens: int) -> int:
    return context_tokens if ask.max_tokens is None else min(ask.max_tokens, context_tokens)


def _answer(body: memoryview | None) -> Answer | None:
    if body is None:
        return None
    try:
        return queries.answer_decoder.decode(body)
    except msgspec.DecodeError:
        return None
