"""A coordinator on the in-memory bus, with a gateway and nodes that speak the wire by hand."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.adapters.keys import Ed25519Signer, Ed25519Verifier
from potluck.adapters.sql import InlineStore, open_store
from potluck.coordinator import audit, bootstrap
from potluck.coordinator.bootstrap import Founding
from potluck.coordinator.coordinator import Coordinator
from potluck.core import grants, ids, merkle, pricing, receipts
from potluck.core.ids import AccountId, BootId, CoordinatorId, Digest, HoldId, KeyId, RequestId
from potluck.core.pricing import Price
from potluck.messages import envelope, membership, money, queries, subjects
from potluck.messages.membership import Heartbeat, Hello, Inventory, Manifest, ReplicaReport, Source
from potluck.messages.money import Receipt, ReceiptBatch
from potluck.messages.serving import WirePrice
from potluck.ports.bus import Delivery
from potluck.ports.store import Store
from potluck.simulator.clock import LoopClock
from potluck.simulator.ids import SeededIds
from potluck.simulator.loop import VirtualTimeLoop
from potluck.simulator.network import MemoryBus, Network

POOL = "home"
CO = CoordinatorId("co_1")
OWNER, PROVIDER = AccountId("acc_owner"), AccountId("acc_provider")
DIGEST = Digest("ab" * 32)
PRICE = Price(input_micro_per_mtok=400_000, output_micro_per_mtok=2_000_000, fee_basis_points=1_000)
MANIFEST = Manifest(
    name="smol",
    digest=DIGEST,
    size_bytes=10,
    format="gguf",
    sources=(Source(kind="path", location="/x"),),
    context_tokens=1024,
    memory_bytes=100,
    redundancy_class="q4",
    licence="Apache-2.0",
)
INVENTORY = Inventory(
    hostname="h", os="linux", arch="x86_64", cpu_model="c", cpu_cores=2, memory_bytes=1,
    disk_free_bytes=1, accelerators=[],
)  # fmt: skip
FOUNDING = Founding(
    owner=OWNER,
    provider=PROVIDER,
    key=KeyId("key_1"),
    key_hash="0" * 64,
    manifest=MANIFEST,
    slots=4,
    price=PRICE,
)


class Peer:
    """One identity with its key, its boot and what it was told."""

    def __init__(self, network: Network, name: str, seed: int, boots: SeededIds) -> None:
        self.signer = Ed25519Signer(bytes([seed]) * 32)
        make = ids.gateway_id if name == "gw" else ids.node_id
        self.id = str(make(self.signer.public_key))
        self.bus: MemoryBus = network.bus(self.id)
        self.boot = BootId(boots.ulid())
        self.stamp = envelope.Stamp(self.boot)
        self.told: list[tuple[str, bytes]] = []

    async def listen(self) -> None:
        await self.bus.subscribe(subjects.received_by(POOL, self.id), self._hear)

    def restart(self, boots: SeededIds) -> None:
        self.boot = BootId(boots.ulid())
        self.stamp = envelope.Stamp(self.boot)

    def tell(self, verb: Any, body: envelope.Body) -> bytes:
        payload = self.stamp.seal(envelope.encode(body))
        self.bus.publish(subjects.to_coordinator(POOL, self.id, verb), payload)
        return payload

    async def ask(self, verb: Any, body: envelope.Body) -> bytes:
        payload = self.stamp.seal(envelope.encode(body))
        return await self.ask_raw(verb, payload)

    async def ask_raw(self, verb: Any, payload: bytes) -> bytes:
        answer = await self.bus.request(
            subjects.to_coordinator(POOL, self.id, verb), payload, 5_000
        )
        return bytes(envelope.split(answer)[2])

    def heard(self, verb: str, decoder: Any) -> list[Any]:
        return [decoder.decode(body) for said, body in self.told if said == verb]

    def _hear(self, delivery: Delivery) -> None:
        body = bytes(envelope.split(delivery.payload)[2])
        self.told.append((subjects.verb_of(delivery.subject), body))


@dataclass
class Pool:
    network: Network
    store: Store
    boots: SeededIds
    gateway: Peer
    nodes: list[Peer]
    coordinator: Coordinator = field(init=False)
    bus: MemoryBus = field(init=False)

    async def start(self, store: Store | None = None) -> None:
        """The coordinator, perhaps again, perhaps on another store."""
        self.store = store or self.store
        self.bus = self.network.bus(CO, privileged=True)
        self.coordinator = Coordinator(
            pool=POOL,
            id=CO,
            store=self.store,
            bus=self.bus,
            clock=LoopClock(),
            ids=self.boots,
            verifier=Ed25519Verifier(),
        )
        await self.coordinator.start()

    async def kill(self) -> None:
        """As by a signal: nothing is told any more, tasks die where they stand."""
        self.bus.drop()
        for task in [*self.coordinator._rounds, *self.coordinator._tasks]:
            task.cancel()
        await asyncio.sleep(0)

    async def everybody_joins(self) -> None:
        await self.gateway.listen()
        greet = membership.Greet(public_key=self.gateway.signer.public_key, version="1")
        await self.gateway.ask("greet", greet)
        for node in self.nodes:
            await node.listen()
            welcome = membership.welcome_decoder.decode(await node.ask("hello", hello(node)))
            assert welcome.refusal == ""
            node.tell("heartbeat", beat())
        await asyncio.sleep(0.1)

    async def hold(self, want_micro: int = 1_000_000, need_micro: int = 1) -> money.HoldReply:
        request = money.HoldRequest(
            hold=HoldId("hold_" + self.boots.ulid()),
            account=OWNER,
            want_micro=want_micro,
            need_micro=need_micro,
        )
        return money.hold_reply_decoder.decode(await self.gateway.ask("hold", request))

    async def query(self, what: Any, **args: str) -> queries.Answer:
        body = queries.Query(what=what, args=args)
        return queries.answer_decoder.decode(await self.gateway.ask("query", body))

    async def command(self, id: str, order: Any, **args: str) -> queries.Answer:
        body = queries.Command(id=id, order=order, args=args)
        return queries.answer_decoder.decode(await self.gateway.ask("command", body))

    async def available_micro(self, account: AccountId = OWNER) -> int:
        return await self.store.transact(lambda tx: tx.balances.get(account).available_micro)

    async def posted_micro(self, account: AccountId) -> int:
        return await self.store.transact(lambda tx: tx.balances.get(account).posted_micro)

    async def sound(self) -> None:
        assert await self.store.transact(audit.check) == []

    def receipt(
        self, held: money.HoldReply, node: Peer, request: str = "req_1", attempt: int = 1,
        prompt: int = 40, completion: int = 8, max_micro: int = 212, **changes: Any,
    ) -> Receipt:  # fmt: skip
        due = receipts.due_for(PRICE, prompt, completion, bill_prompt=True)
        cost = pricing.capped(due, max_micro, PRICE)
        name = RequestId(request)
        seal = grants.seal(
            held.grant_key, request=name, attempt=attempt, node=ids.NodeId(node.id),
            hold=held.hold, boot=self.gateway.boot, max_micro=max_micro, bill_prompt=True,
            price=PRICE,
        )  # fmt: skip
        words: dict[str, Any] = {
            "receipt": ids.receipt_id(name, attempt), "request": name, "attempt": attempt,
            "hold": held.hold, "boot": self.gateway.boot, "gateway": self.gateway.id,
            "node": node.id, "max_micro": max_micro, "seal": seal, "bill_prompt": True,
            "price": WirePrice(400_000, 2_000_000, 1_000), "model": DIGEST, "engine": "cd" * 32,
            "tier": "limited", "prompt_tokens": prompt, "completion_tokens": completion,
            "provider_micro": cost.provider_micro, "fee_micro": cost.fee_micro, "queue_ms": 0,
            "prefill_ms": 1, "decode_ms": 2, "input_digest": "00" * 32, "output_digest": "11" * 32,
            "outcome": "stop",
        }  # fmt: skip
        return Receipt(**{**words, **changes})


def batch(node: Peer, *said: Receipt | bytes) -> ReceiptBatch:
    leaves = [one if isinstance(one, bytes) else envelope.encode(one) for one in said]
    root = merkle.root(leaves)
    signature = node.signer.sign(money.RECEIPTS_DOMAIN + root)
    return ReceiptBatch(root=root, signature=signature, receipts=leaves)


def countersigned(gateway: Peer, *said: money.Delivery) -> money.Countersignature:
    leaves = [envelope.encode(one) for one in said]
    root = merkle.root(leaves)
    signature = gateway.signer.sign(money.COUNTERSIGN_DOMAIN + root)
    return money.Countersignature(root=root, signature=signature, deliveries=leaves)


def hello(node: Peer, **changes: Any) -> Hello:
    words: dict[str, Any] = {
        "public_key": node.signer.public_key, "name": node.id[:12], "account": PROVIDER,
        "version": "1", "tier": "limited", "tier_reason": "no cgroups", "inventory": INVENTORY,
    }  # fmt: skip
    return Hello(**{**words, **changes})


def beat(state: Any = "ready", revision: int = 1, replicas: bool = True) -> Heartbeat:
    report = ReplicaReport(digest=DIGEST, state=state, slots=4, in_flight=0, context_tokens=1024)
    return Heartbeat(
        replicas=[report] if replicas else [], deploy_revision=revision, cpu_percent=1.0,
        memory_free_bytes=1, disk_free_bytes=1, receipts_waiting=0,
    )  # fmt: skip


def in_pool(work: Callable[[Pool], Awaitable[None]], nodes: int = 1) -> None:
    """Runs `work` on virtual time with everybody joined; checks the books at the end."""
    loop, store = VirtualTimeLoop(), InlineStore()
    try:
        loop.run_until_complete(_joined(work, nodes, store))
    finally:
        loop.close()
        store.connection.close()


def on_disk(path: Path, work: Callable[[Pool], Awaitable[None]], nodes: int = 1) -> None:
    """The same with the writer thread and a file, in real time."""

    async def run() -> None:
        store = await open_store(path)
        await _joined(work, nodes, store)
        await store.close()

    asyncio.run(run())


async def _joined(work: Callable[[Pool], Awaitable[None]], nodes: int, disk: Store) -> None:
    network, boots = Network(), SeededIds(random.Random(1))
    await disk.transact(lambda tx: bootstrap.ensure(tx, FOUNDING, 1, boots))
    pool = Pool(
        network=network,
        store=disk,
        boots=boots,
        gateway=Peer(network, "gw", 1, boots),
        nodes=[Peer(network, "node", 10 + number, boots) for number in range(nodes)],
    )
    await pool.start()
    await pool.everybody_joins()
    await work(pool)
    await pool.sound()
    await pool.coordinator.stop()
    assert pool.coordinator.counters["failed"] == 0
    assert pool.coordinator.counters["internal"] == 0
