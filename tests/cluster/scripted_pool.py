"""A coordinator and nodes that speak the wire by script: fakes at the bus, for gateway tests."""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from potluck.core import parameters
from potluck.core.ids import AccountId, BootId, Digest, HoldId, KeyId, NodeId, RequestId
from potluck.messages import envelope, membership, money, queries, subjects
from potluck.messages.membership import Replicas, WireReplica
from potluck.messages.money import HoldReply, Settled, Settlement
from potluck.messages.queries import Answer, KeyRecord
from potluck.messages.serving import (
    Accepted,
    Ack,
    Cancel,
    Chunk,
    Done,
    Frames,
    Infer,
    Resend,
    ToGateway,
    WirePrice,
    serve_decoder,
)
from potluck.ports.bus import Bus, BusClosedError, Delivery

POOL = "home"
KEY = "pk_" + "a" * 43
ADMIN_KEY = "pk_" + "b" * 43
ALICE = AccountId("acc_alice")
DIGEST = Digest("ab" * 32)
PRICE = WirePrice(
    input_micro_per_mtok=400_000, output_micro_per_mtok=2_000_000, fee_basis_points=1_000
)
GRANT_KEY = b"k" * 32


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def replica(node: str, **changes: object) -> WireReplica:
    values: dict[str, object] = {
        "node": NodeId(node), "node_name": node, "model": "tiny", "digest": DIGEST,
        "context_tokens": 2048, "slots": 4, "price": PRICE, "liveness": "alive", "ready": True,
    }  # fmt: skip
    return WireReplica(**{**values, **changes})  # type: ignore[arg-type]


class Speaker:
    def __init__(self, bus: Bus, me: str, boot: str) -> None:
        self.bus, self.me = bus, me
        self._stamp = envelope.Stamp(BootId(boot))

    def tell(self, verb: str, receiver: str, body: msgspec.Struct) -> bytes:
        payload = self._stamp.seal(envelope.encode(body))
        self.bus.publish(subjects.subject(POOL, self.me, verb, receiver), payload)  # type: ignore[arg-type]
        return payload

    def answer(self, delivery: Delivery, body: msgspec.Struct) -> None:
        with contextlib.suppress(BusClosedError):
            self.bus.publish(delivery.reply, self._stamp.seal(envelope.encode(body)))


class Coordinator:
    """Money by account, keys by hash, replicas by list. `away`: hears, but never answers."""

    def __init__(self, bus: Bus, replicas: list[WireReplica], available_micro: int = 10_000_000):
        self.speaker = Speaker(bus, "co_1", "0" * 25 + "1")
        self.bus = bus
        self.replicas = replicas
        self.available_micro = {ALICE: available_micro}
        self.keys: dict[str, KeyRecord | str] = {
            sha(KEY): key_record(),
            sha(ADMIN_KEY): KeyRecord(KeyId("key_2"), ALICE, None, None, True),
        }
        self.holds: dict[HoldId, tuple[AccountId, int]] = {}
        self.away = False
        self.offset = 1
        self.heard: list[tuple[str, object]] = []
        self.answers: dict[str, Answer] = {}
        self.life_ms = parameters.hold_life_ms
        self.hold_delay_s = 0.0

    async def start(self) -> None:
        await self.bus.subscribe(subjects.received_by(POOL, "_"), self._receive)
        await self.bus.subscribe(subjects.received_by(POOL, "co_1"), self._receive)

    def count(self, verb: str) -> int:
        return sum(1 for heard, _ in self.heard if heard == verb)

    def of(self, verb: str) -> list[object]:
        return [body for heard, body in self.heard if heard == verb]

    def settle(self, gateway: str, hold: HoldId, request: str, attempt: int, micro: int) -> None:
        items = [Settlement(request=RequestId(request), attempt=attempt, total_micro=micro)]
        self.speaker.tell("settled", gateway, Settled(hold=hold, items=items))

    def table(self) -> Replicas:
        return Replicas(
            epoch="e1", follows=0, offset=self.offset, whole=True, changed=self.replicas,
            removed=[],
        )  # fmt: skip

    def _receive(self, delivery: Delivery) -> None:
        verb = subjects.verb_of(delivery.subject)
        body = envelope.split(delivery.payload)[2]
        decoder = {
            "greet": membership.greet_decoder, "hold": money.hold_request_decoder,
            "renew": money.hold_renewal_decoder, "release": money.hold_release_decoder,
            "query": queries.query_decoder, "command": queries.command_decoder,
            "countersign": money.countersignature_decoder,
        }[verb]  # fmt: skip
        word = decoder.decode(body)
        self.heard.append((verb, word))
        if self.away:
            return
        answer = getattr(self, "_" + verb)(word)
        if answer is None:
            return
        if self.hold_delay_s and verb == "hold":
            loop = asyncio.get_running_loop()
            loop.call_later(self.hold_delay_s, self.speaker.answer, delivery, answer)
        else:
            self.speaker.answer(delivery, answer)

    def _greet(self, _word: object) -> Replicas:
        return self.table()

    def _hold(self, word: money.HoldRequest) -> HoldReply:
        known = self.holds.get(word.hold)
        available_micro = self.available_micro.get(word.account, 0)
        amount_micro = known[1] if known else min(word.want_micro, available_micro)
        if amount_micro < max(1, word.need_micro):
            return HoldReply(word.hold, 0, 0, b"", "insufficient_funds")
        if known is None:
            self.available_micro[word.account] -= amount_micro
            self.holds[word.hold] = (word.account, amount_micro)
        return HoldReply(word.hold, amount_micro, self.life_ms, GRANT_KEY)

    def _renew(self, word: money.HoldRenewal) -> HoldReply:
        if word.hold not in self.holds:
            return HoldReply(word.hold, 0, 0, b"", "unknown_hold")
        return HoldReply(word.hold, self.holds[word.hold][1], self.life_ms, GRANT_KEY)

    def _release(self, word: money.HoldRelease) -> None:
        account, amount_micro = self.holds.pop(word.hold, (ALICE, 0))
        self.available_micro[account] += amount_micro

    def _countersign(self, _word: object) -> None:
        return None

    def _query(self, word: queries.Query) -> Answer:
        if word.what in self.answers:
            return self.answers[word.what]
        if word.what != "key":
            return Answer("", self.offset, b"{}")
        found = self.keys.get(word.args["hash"], "key_not_found")
        if isinstance(found, str):
            return Answer(found, self.offset, b"")
        return Answer("", self.offset, msgspec.json.encode(found))

    def _command(self, word: queries.Command) -> Answer:
        return self.answers.get(word.order, Answer("", self.offset, b"{}"))


def key_record(lives_ms: int | None = None) -> KeyRecord:
    return KeyRecord(KeyId("key_1"), ALICE, None, lives_ms, False)


Script = Callable[["Node", Infer], Awaitable[None]]


@dataclass
class Node:
    """Runs `script` for each new attempt; keeps all that it hears."""

    bus: Bus
    me: str
    script: Script
    gateway: str = ""
    infers: list[Infer] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    resends: list[Resend] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        number = int.from_bytes(self.me.encode(), "big") % 30
        self.speaker = Speaker(self.bus, self.me, f"{number:026d}")
        await self.bus.subscribe(subjects.received_by(POOL, self.me), self._receive)

    def say(self, *items: ToGateway) -> bytes:
        return self.speaker.tell("frames", self.gateway, Frames(items=list(items)))

    def last_ack(self) -> int:
        return self.acks[-1].seq if self.acks else -1

    def _receive(self, delivery: Delivery) -> None:
        self.gateway = subjects.sender_of(delivery.subject)
        for item in serve_decoder.decode(envelope.split(delivery.payload)[2]).items:
            if isinstance(item, Infer):
                known = any((i.request, i.attempt) == (item.request, item.attempt)
                            for i in self.infers)  # fmt: skip
                self.infers.append(item)
                if not known:
                    task = asyncio.get_running_loop().create_task(self._run(item))
                    self.tasks.add(task)
                    task.add_done_callback(self.tasks.discard)
            elif isinstance(item, Ack):
                self.acks.append(item)
            elif isinstance(item, Resend):
                self.resends.append(item)
            else:
                self.cancels.append(item)

    async def _run(self, infer: Infer) -> None:
        await self.script(self, infer)


def accepted(infer: Infer) -> Accepted:
    return Accepted(request=infer.request, attempt=infer.attempt, queue_depth=0)


def chunk(infer: Infer, seq: int, data: bytes = b"x", tokens: int = 1, logprobs: bytes = b""):
    return Chunk(
        request=infer.request, attempt=infer.attempt, seq=seq, token_ids=tuple(range(tokens)),
        data=data, logprobs=logprobs,
    )  # fmt: skip


def done(infer: Infer, last_seq: int, prompt: int = 40, completion: int = 8, reason: str = "stop"):
    return Done(
        request=infer.request, attempt=infer.attempt, last_seq=last_seq, finish_reason=reason,  # type: ignore[arg-type]
        prompt_tokens=prompt, completion_tokens=completion, queue_ms=1, prefill_ms=2, decode_ms=3,
    )  # fmt: skip


async def good_day(node: Node, infer: Infer) -> None:
    """Eight tokens in four chunks."""
    node.say(accepted(infer))
    for seq, word in enumerate((b"Once", b" upon", b" a", b" time")):
        node.say(chunk(infer, seq, word, 2))
        await asyncio.sleep(0.005)
    node.say(done(infer, 3))
