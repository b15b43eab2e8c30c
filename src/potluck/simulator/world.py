"""One seed, one world: the real rooms on virtual time, with what goes wrong in it.

First safety: faults rage, checkers look each tick. Then liveness: the faults stop, and everything
must come to rest, paid and released.
"""

import asyncio
import hashlib
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from potluck.adapters import accelerators
from potluck.adapters.keys import Ed25519Signer, Ed25519Verifier
from potluck.adapters.sql import connections
from potluck.adapters.sql.inline import InlineStore
from potluck.agent.agent import Agent
from potluck.coordinator import bootstrap
from potluck.coordinator.bootstrap import Founding
from potluck.coordinator.coordinator import Coordinator
from potluck.core import parameters
from potluck.core.ids import AccountId, CoordinatorId, Digest, KeyId, gateway_id, node_id
from potluck.core.pricing import Price
from potluck.gateway.serving.serving import Serving
from potluck.messages.membership import Manifest, Source
from potluck.ports.bus import Bus, BusClosedError, Delivery
from potluck.ports.models import Progress
from potluck.ports.store import ResultT, StoreUnavailableError, Tx
from potluck.simulator import checkers, faults, machine
from potluck.simulator.clock import LoopClock
from potluck.simulator.engine import FakeRuntime
from potluck.simulator.faults import Faults, Weather
from potluck.simulator.ids import SeededIds
from potluck.simulator.liar import LyingBus
from potluck.simulator.loop import VirtualTimeLoop
from potluck.simulator.machine import Machine
from potluck.simulator.network import Network
from potluck.simulator.workload import MODEL, Requester, Story

POOL = "home"
LIAR = "node-1"
COORDINATOR = CoordinatorId("co_SIMULATED")
OWNER, PROVIDER = AccountId("acc_owner"), AccountId("acc_provider")
KEY_HASH = hashlib.sha256(b"pk_simulated").hexdigest()
TICK_MS = 100
RESTART_MS_MAX = 3_000
FAULTY_MS = 40_000
CALM_MS_MAX = 240_000
PRICE = Price(
    input_micro_per_mtok=parameters.price_input_micro_per_mtok,
    output_micro_per_mtok=parameters.price_output_micro_per_mtok,
    fee_basis_points=parameters.fee_basis_points,
)
MANIFEST = Manifest(
    name=MODEL,
    digest=Digest("1" * 64),
    size_bytes=1,
    format="gguf",
    sources=(Source(kind="path", location="imagined"),),
    context_tokens=2_048,
    memory_bytes=1,
    redundancy_class="imagined",
    licence="none",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`digest` names the whole course of the world: equal seeds, equal digests."""

    seed: int
    digest: str
    faults: Faults
    messages: int
    crashes: int
    virtual_ms: int
    finished: int
    requests: int


class ImaginedModels:
    """`ports.models.ModelStore`: the file is always there."""

    async def obtain(
        self, digest: Digest, size_bytes: int, sources: tuple[tuple[str, str], ...],
        progress: Progress,
    ) -> Path:  # fmt: skip
        return Path("imagined") / digest


class ProcessDiedError(StoreUnavailableError):
    """Whoever sees it is dead already."""


class CrashingStore:
    """The coordinator's store; now and then its process dies right after a commit."""

    def __init__(self, inner: InlineStore, crash: Callable[[], bool]) -> None:
        self._inner = inner
        self._crash = crash

    async def transact(self, work: Callable[[Tx], ResultT]) -> ResultT:
        result = await self._inner.transact(work)
        if self._crash():
            raise ProcessDiedError("between record and tell")
        return result

    async def close(self) -> None:
        await self._inner.close()


class World:
    def __init__(self, seed: int, folder: Path, nodes: int, requesters: int) -> None:
        self.rng = random.Random(seed)
        self.weather = Weather(self.rng, faults.draw(self.rng))
        self.network = Network(self.weather.fate)
        self.network.on_deliver = self._note
        self.clock = LoopClock()
        self.disk = connections.connect(":memory:")
        self.books = InlineStore(self.disk)
        self.gateway: Serving | None = None
        self.coordinator: Machine | None = None
        self.runtimes: dict[str, FakeRuntime] = {}
        self.stories: list[Story] = []
        self.crashes = 0
        self.messages = 0
        self.broken: BaseException | None = None
        self._folder = folder
        self._lying = self.weather.faults.lying
        self._nodes = [f"node-{index}" for index in range(1, nodes + 1)]
        self._requesters = requesters
        self._machines: dict[str, Machine] = {}
        self._digest = hashlib.sha256()
        # A later start of the same process must sort higher, so ids go on where they stood.
        names = ["coordinator", "gateway", *self._nodes]
        self._ids = {name: SeededIds(random.Random(f"{seed} {name}")) for name in names}
        self._signers = {
            name: Ed25519Signer(random.Random(f"{seed} {name} key").randbytes(32)) for name in names
        }

    async def run(self) -> None:
        founding = Founding(
            owner=OWNER, provider=PROVIDER, key=KeyId("key_owner"), key_hash=KEY_HASH,
            manifest=MANIFEST, slots=4, price=PRICE,
        )  # fmt: skip
        now_ms, ids = self.clock.wall_ms(), self._ids["coordinator"]
        self.books.run(lambda tx: bootstrap.ensure(tx, founding, now_ms, ids))
        for name in ("coordinator", "gateway", *self._nodes):
            self._boot(name)
        failing = [asyncio.create_task(self._fail(name)) for name in self._machines]
        failing.append(asyncio.create_task(self._fail_engines()))
        people = [self._person(f"requester-{index}") for index in range(self._requesters)]
        requests = [asyncio.create_task(one.run(8)) for one in people]
        await self._watch(lambda: self.clock.now_ms() >= FAULTY_MS)
        self.weather.faults = faults.CALM
        for task in failing:
            task.cancel()
        for name in list(self._machines):
            self._reboot(name)
        until_ms = self.clock.now_ms() + CALM_MS_MAX
        await self._watch(lambda: all(task.done() for task in requests)
                          or self.clock.now_ms() > until_ms)  # fmt: skip
        assert all(task.done() for task in requests), "requesters still wait after the faults"
        for task in requests:
            task.result()
        await self._rest()

    async def _rest(self) -> None:
        """Nothing is asked any more: all receipts settle, holds lapse, engines are idle."""
        until_ms = self.clock.now_ms() + CALM_MS_MAX
        await self._watch(lambda: self.clock.now_ms() > until_ms)
        await self.clock.sleep_ms(
            2 * parameters.hold_life_ms + parameters.hold_grace_ms + 2 * parameters.hold_renewal_ms
        )
        self._check()
        checkers.bills(self.books, self.stories, lying=self._lying)
        checkers.finished(self.books, self.stories)
        await self._probe()
        busy = [name for name, one in self.runtimes.items()
                if any(engine.running for engine in one.engines)]  # fmt: skip
        assert not busy, f"engines of {busy} still run"

    async def _probe(self) -> None:
        """After all that, one more question is answered at once."""
        prober = self._person("prober")
        await prober.run(1)
        await self.clock.sleep_ms(2 * parameters.acknowledgement_silence_ms)
        assert self.stories[-1].outcome in ("finished", "left"), f"{self.stories[-1]} at the end"

    async def _watch(self, over: Callable[[], bool]) -> None:
        while not over():
            await self.clock.sleep_ms(TICK_MS)
            self._check()

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken
        checkers.books(self.books)
        checkers.streams(self.stories)
        if self.gateway is not None:
            checkers.purses(self.books, self.gateway, lying=self._lying)

    def _person(self, name: str) -> Requester:
        return Requester(
            name=name,
            key_hash=KEY_HASH,
            rng=random.Random(self.rng.random()),
            clock=self.clock,
            gateway=lambda: self.gateway,
            stories=self.stories,
        )

    # Processes

    def _boot(self, name: str) -> None:
        start = {"coordinator": self._coordinator, "gateway": self._gateway}.get(name, self._node)
        one = self._machines[name] = Machine(name)
        one.spawn(start(name, one))

    async def _coordinator(self, name: str, one: Machine) -> None:
        def crash() -> bool:
            chance = self.weather.faults.crash_after_commit
            if chance and self.rng.random() < chance:
                self._crash(name)
                return True
            return False

        coordinator = Coordinator(
            pool=POOL, id=COORDINATOR, store=CrashingStore(InlineStore(self.disk), crash),
            bus=one.connect(self.network, COORDINATOR, privileged=True), clock=self.clock,
            ids=self._ids[name], verifier=Ed25519Verifier(),
        )  # fmt: skip
        await coordinator.start()

    async def _gateway(self, name: str, one: Machine) -> None:
        signer = self._signers[name]
        gateway = Serving(
            pool=POOL, signer=signer, clock=self.clock, ids=self._ids[name],
            bus=one.connect(self.network, gateway_id(signer.public_key)),
        )  # fmt: skip
        await gateway.start()
        self.gateway = gateway

    async def _node(self, name: str, one: Machine) -> None:
        signer = self._signers[name]
        runtime = self.runtimes[name] = FakeRuntime()
        bus: Bus = one.connect(self.network, node_id(signer.public_key))
        if name == LIAR:
            bus = LyingBus(bus, signer, lambda: self.weather.faults.lying)
        agent = Agent(
            pool=POOL, name=name, account=PROVIDER, signer=signer, clock=self.clock,
            bus=bus, ids=self._ids[name],
            runtime=runtime, models=ImaginedModels(), accelerators=accelerators.NoAccelerators(),
            data=self._folder / name, threads=1, tier=("full", "imagined"),
        )  # fmt: skip
        await agent.start()

    # Faults

    async def _fail(self, name: str) -> None:
        """Crashes one process again and again."""
        mean_ms = self._crash_mean_ms(name)
        while mean_ms is not None:
            await self.clock.sleep_ms(self.weather.next_crash_ms(mean_ms))
            self._crash(name)

    async def _fail_engines(self) -> None:
        mean_ms = self.weather.faults.engine_death_ms
        while mean_ms is not None:
            await self.clock.sleep_ms(self.weather.next_crash_ms(mean_ms))
            name = self.rng.choice(sorted(self.runtimes))
            self._write(f"{self.clock.now_ms()} engines of {name} die")
            for engine in self.runtimes[name].engines:
                engine.die()

    def _crash_mean_ms(self, name: str) -> int | None:
        drawn = self.weather.faults
        if name == "gateway":
            return drawn.gateway_crash_ms
        return drawn.coordinator_crash_ms if name == "coordinator" else drawn.node_crash_ms

    def _crash(self, name: str) -> None:
        one = self._machines[name]
        if not one.alive:
            return
        self.crashes += 1
        self._write(f"{self.clock.now_ms()} crash {name}")
        if name == "gateway":
            self.gateway = None
        one.kill()
        delay_ms = self.rng.randint(1, RESTART_MS_MAX)
        asyncio.get_running_loop().call_later(delay_ms / 1000, self._reboot, name)

    def _reboot(self, name: str) -> None:
        if not self._machines[name].alive:
            self._boot(name)

    # The trace

    def _note(self, receiver: str, delivery: Delivery) -> None:
        self.messages += 1
        self._write(f"{self.clock.now_ms()} {receiver} {delivery.subject}")

    def _write(self, line: str) -> None:
        self._digest.update(line.encode() + b"\n")

    def outcome(self, seed: int, drawn: Faults) -> Outcome:
        return Outcome(
            seed=seed,
            digest=self._digest.hexdigest()[:16],
            faults=drawn,
            messages=self.messages,
            crashes=self.crashes,
            virtual_ms=self.clock.now_ms(),
            finished=sum(story.outcome == "finished" for story in self.stories),
            requests=len(self.stories),
        )


def run(seed: int, *, nodes: int = 3, requesters: int = 4) -> Outcome:
    """Lives through one world. Raises `AssertionError` with the seed if a rule is broken."""
    loop = VirtualTimeLoop()
    machine.install(loop)
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder), nodes, requesters)
        drawn = world.weather.faults
        loop.set_exception_handler(lambda _loop, context: _loose(world, context))

        async def live() -> Outcome:
            await world.run()
            return world.outcome(seed, drawn)

        try:
            return loop.run_until_complete(live())
        except AssertionError as error:
            raise AssertionError(f"seed {seed} ({drawn}): {error}") from error
        finally:
            _end(loop)
            world.disk.close()


def _loose(world: World, context: dict[str, object]) -> None:
    """An error nobody awaited. A dead process may still stumble over what was closed under it."""
    error = context.get("exception")
    if isinstance(error, BaseException) and not isinstance(
        error, BusClosedError | ProcessDiedError
    ):
        world.broken = world.broken or error


def _end(loop: VirtualTimeLoop) -> None:
    leftovers = asyncio.all_tasks(loop)
    for leftover in leftovers:
        leftover.cancel()
    loop.run_until_complete(asyncio.gather(*leftovers, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
