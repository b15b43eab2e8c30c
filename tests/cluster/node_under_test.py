"""One real agent on virtual time, with a gateway and a coordinator that tests play by hand."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from potluck.adapters.accelerators import NoAccelerators
from potluck.adapters.keys import Ed25519Signer, Ed25519Verifier
from potluck.agent.agent import Agent
from potluck.core import merkle
from potluck.core.ids import AccountId, BootId, Digest, HoldId, RequestId
from potluck.messages import envelope, subjects
from potluck.messages import serving as s
from potluck.messages.membership import (
    Deploy,
    Deployment,
    Manifest,
    Source,
    Welcome,
    heartbeat_decoder,
    hello_decoder,
)
from potluck.messages.money import (
    RECEIPTS_DOMAIN,
    Receipt,
    ReceiptsAck,
    receipt_batch_decoder,
    receipt_decoder,
)
from potluck.ports.bus import Delivery
from potluck.simulator.clock import LoopClock
from potluck.simulator.engine import FakeRuntime
from potluck.simulator.ids import SeededIds
from potluck.simulator.loop import VirtualTimeLoop
from potluck.simulator.models import FakeModels
from potluck.simulator.network import Network

POOL = "home"
MODEL = Digest("a" * 64)
MESSAGES = b'[{"role":"user","content":"what is there to eat?"}]'
PRICE = s.WirePrice(400_000, 2_000_000, 1_000)


def run(test: Callable[["House"], Awaitable[None]], data: Path, **fakes: int) -> None:
    """Runs a test on virtual time, in its own small network."""
    loop = VirtualTimeLoop()
    asyncio.set_event_loop(None)
    try:
        loop.run_until_complete(_run(test, data, fakes))
    finally:
        loop.close()


async def _run(
    test: Callable[["House"], Awaitable[None]], data: Path, fakes: dict[str, int]
) -> None:
    house = House(data, **fakes)
    await house.open()
    try:
        await test(house)
    finally:
        house.agent.kill()


class House:
    def __init__(self, data: Path, **fakes: int) -> None:
        self.network = Network()
        self.runtime = FakeRuntime(**fakes)
        self.models = FakeModels()
        self.data = data
        self.rng = random.Random(7)
        self.ids = SeededIds(self.rng)
        self.signer = Ed25519Signer(bytes(32))
        self.gateway = Gateway(self, "gw_1")
        self.coordinator = Coordinator(self)
        self.agent = self.new_agent()

    def new_agent(self) -> Agent:
        from potluck.core.ids import node_id

        self.bus = self.network.bus(node_id(self.signer.public_key))
        return Agent(
            pool=POOL, name="kitchen", account=AccountId("acc_1"), signer=self.signer, bus=self.bus,
            clock=LoopClock(), ids=self.ids, runtime=self.runtime, models=self.models,
            accelerators=NoAccelerators(), data=self.data, threads=1, tier=("full", "for tests"),
        )  # fmt: skip

    async def open(self) -> None:
        await self.coordinator.open()
        await self.gateway.open()
        await self.agent.start()

    async def restart(self) -> None:
        """kill -9, and a new start on the same disk."""
        self.agent.kill()
        self.bus.drop()
        self.agent = self.new_agent()
        await self.agent.start()

    async def serve(self, *, slots: int = 2, context_tokens: int = 4096) -> None:
        self.coordinator.deploy(slots=slots, context_tokens=context_tokens)
        await self.until(lambda: self.agent.deployments.ready(MODEL) is not None)

    async def until(self, true: Callable[[], bool], within_s: float = 120.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():
                await asyncio.sleep(0.01)


class Peer:
    def __init__(self, house: House, identity: str, privileged: bool = False) -> None:
        self.house = house
        self.identity = identity
        self.bus = house.network.bus(identity, privileged=privileged)
        self.stamp = envelope.Stamp(BootId(house.ids.ulid()))

    def say(self, verb: subjects.Verb, body: envelope.Body) -> bytes:
        payload = self.stamp.seal(envelope.encode(body))
        self.say_raw(verb, payload)
        return payload

    def say_raw(self, verb: subjects.Verb, payload: bytes) -> None:
        node = self.house.agent.node
        self.bus.publish(subjects.subject(POOL, self.identity, verb, node), payload)


class Gateway(Peer):
    """Takes chunks in order and acknowledges each batch, unless told otherwise."""

    def __init__(self, house: House, identity: str) -> None:
        super().__init__(house, identity)
        self.acknowledging = True
        self.lose: Callable[[s.ToGateway], bool] = lambda _item: False
        self.frames: list[s.ToGateway] = []
        self.chunks: dict[tuple[str, int], list[s.Chunk]] = {}
        self.messages = 0

    async def open(self) -> None:
        await self.bus.subscribe(subjects.received_by(POOL, self.identity, "frames"), self.hear)

    def infer(self, request: str = "req_1", attempt: int = 1, **changes: object) -> s.Infer:
        infer = s.Infer(
            request=RequestId(request), attempt=attempt,
            grant=s.Grant(HoldId("hold_1"), self.stamp.boot, 10_000_000, b"seal"), price=PRICE,
            model=MODEL, messages=MESSAGES, sampling=s.Sampling(8), stream=True, bill_prompt=True,
            first_token_ms=10_000, total_ms=600_000,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(infer, name, value)
        return infer

    def ask(self, infer: s.Infer) -> None:
        self.serve(infer)

    def serve(self, *items: s.ToNode) -> bytes:
        return self.say("serve", s.Serve(list(items)))

    def hear(self, delivery: Delivery) -> None:
        self.messages += 1
        items = s.frames_decoder.decode(envelope.split(delivery.payload)[2]).items
        for item in items:
            if self.lose(item):
                continue
            self.frames.append(item)
            if isinstance(item, s.Chunk):
                self._take(item)
            elif isinstance(item, s.Done) and self.acknowledging:
                self.serve(s.Ack(item.request, item.attempt, item.last_seq))

    def _take(self, chunk: s.Chunk) -> None:
        taken = self.chunks.setdefault((chunk.request, chunk.attempt), [])
        if chunk.seq == len(taken):
            taken.append(chunk)
            if self.acknowledging:
                self.serve(s.Ack(chunk.request, chunk.attempt, chunk.seq))
        elif chunk.seq > len(taken):
            self.serve(s.Resend(chunk.request, chunk.attempt, len(taken)))

    def of(self, kind: type[s.ToGateway], request: str = "req_1", attempt: int = 1) -> list:
        return [
            one
            for one in self.frames
            if isinstance(one, kind) and (one.request, one.attempt) == (request, attempt)
        ]

    def text(self, request: str = "req_1", attempt: int = 1) -> bytes:
        return b"".join(one.data for one in self.chunks.get((request, attempt), []))

    def tokens(self, request: str = "req_1", attempt: int = 1) -> int:
        return sum(len(one.token_ids) for one in self.chunks.get((request, attempt), []))


class Coordinator(Peer):
    def __init__(self, house: House) -> None:
        super().__init__(house, "co_1", privileged=True)
        self.welcoming = True
        self.acknowledging = True
        self.hellos: list = []
        self.beats: list = []
        self.batches = 0
        self.receipts: dict[str, Receipt] = {}
        self.revision = 0

    async def open(self) -> None:
        for verb in ("hello", "heartbeat", "receipts"):
            subject = subjects.received_by(POOL, "_", verb)
            await self.bus.subscribe(subject, getattr(self, f"on_{verb}"))

    def deploy(self, *, slots: int = 2, context_tokens: int = 4096, wanted: bool = True) -> None:
        manifest = Manifest(
            "tiny", MODEL, 10, "gguf", (Source("path", "/m"),), context_tokens, 1, "c", "l"
        )
        self.revision += 1
        self.say("deploy", Deploy(self.revision, [Deployment(manifest, slots)] if wanted else []))

    def on_hello(self, delivery: Delivery) -> None:
        self.hellos.append(hello_decoder.decode(envelope.split(delivery.payload)[2]))
        if self.welcoming:
            self.bus.publish(delivery.reply, self.stamp.seal(envelope.encode(Welcome())))

    def on_heartbeat(self, delivery: Delivery) -> None:
        self.beats.append(heartbeat_decoder.decode(envelope.split(delivery.payload)[2]))

    def on_receipts(self, delivery: Delivery) -> None:
        self.batches += 1
        batch = receipt_batch_decoder.decode(envelope.split(delivery.payload)[2])
        assert merkle.root(batch.receipts) == batch.root
        key = self.house.signer.public_key
        assert Ed25519Verifier().verify(key, batch.signature, RECEIPTS_DOMAIN + batch.root)
        receipts = [receipt_decoder.decode(one) for one in batch.receipts]
        for one in receipts:
            self.receipts[one.receipt] = one
        if self.acknowledging:
            self.say("receipts_ack", ReceiptsAck([one.receipt for one in receipts], []))
