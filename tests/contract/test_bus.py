"""One suite for every bus: in memory, and NATS with its real server and permissions."""

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from potluck.adapters.nats import credentials, server
from potluck.adapters.nats.bus import NatsBus
from potluck.core import parameters
from potluck.messages import subjects
from potluck.ports.bus import Bus, BusClosedError, BusTimeoutError, Delivery
from potluck.simulator.network import Network

POOL = "home"
GATEWAY, NODE, COORDINATOR = "gw_1", "node_a", "co_1"


class World:
    """Three identities on one bus."""

    def __init__(self, connect: Callable[[str], Awaitable[Bus]]) -> None:
        self.connect = connect


@asynccontextmanager
async def memory(_folder: Path) -> AsyncIterator[World]:
    network = Network()

    async def connect(identity: str) -> Bus:
        return network.bus(identity, privileged=identity == COORDINATOR)

    yield World(connect)


@asynccontextmanager
async def nats(folder: Path) -> AsyncIterator[World]:
    authority = credentials.Authority(folder / "keys")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server.write_config(folder / "nats.json", port=port, authority=authority)
    process = subprocess.Popen(
        server.argv(folder / "nats.json"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    buses: list[NatsBus] = []

    async def connect(identity: str) -> Bus:
        rights = (
            credentials.coordinator_rights(POOL, identity)
            if identity == COORDINATOR
            else credentials.gateway_rights(POOL, identity)
            if identity == GATEWAY
            else credentials.node_rights(POOL, identity)
        )
        path = folder / f"{identity}.creds"
        path.write_bytes(authority.member(identity, rights))
        observer = None
        if identity == COORDINATOR:
            observer = folder / "observer.creds"
            observer.write_bytes(authority.observer(identity))
        url = f"nats://127.0.0.1:{port}"
        bus = await NatsBus.connect(url, path, identity, observer_credentials=observer)
        buses.append(bus)
        return bus

    try:
        yield World(connect)
    finally:
        for bus in buses:
            await bus.drain()
        process.terminate()
        process.wait()


Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture(params=[memory, nats], ids=["memory", "nats"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    def go(scenario: Scenario) -> None:
        async def main() -> None:
            async with request.param(tmp_path) as world:
                await scenario(world)

        asyncio.run(main())

    return go


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_messages_arrive_in_order_with_their_subject(run) -> None:
    async def scenario(world: World) -> None:
        gateway, node = await world.connect(GATEWAY), await world.connect(NODE)
        heard: list[Delivery] = []
        await node.subscribe(subjects.received_by(POOL, NODE), heard.append)
        subject = subjects.subject(POOL, GATEWAY, "serve", NODE)
        for index in range(200):
            gateway.publish(subject, b"%d" % index)
        await until(lambda: len(heard) == 200)
        assert [int(one.payload) for one in heard] == list(range(200))
        assert subjects.sender_of(heard[0].subject) == GATEWAY
        assert heard[0].reply == ""

    run(scenario)


def test_one_cannot_speak_as_another_nor_listen_for_another(run) -> None:
    async def scenario(world: World) -> None:
        node, coordinator = await world.connect(NODE), await world.connect(COORDINATOR)
        heard: list[Delivery] = []
        await coordinator.subscribe(subjects.received_by(POOL, "_"), heard.append)
        node.publish(subjects.to_coordinator(POOL, GATEWAY, "hold"), b"forged")
        node.publish("_INBOX.gw_1.x", b"forged answer")
        overheard: list[Delivery] = []
        with suppress(BusClosedError):
            await node.subscribe(subjects.received_by(POOL, GATEWAY), overheard.append)
        coordinator.publish(subjects.subject(POOL, COORDINATOR, "settled", GATEWAY), b"secret")
        node.publish(subjects.to_coordinator(POOL, NODE, "heartbeat"), b"honest")
        await until(lambda: bool(heard))
        await asyncio.sleep(0.05)
        assert [one.payload for one in heard] == [b"honest"]
        assert overheard == []

    run(scenario)


def test_a_request_is_answered_or_times_out(run) -> None:
    async def scenario(world: World) -> None:
        gateway, coordinator = await world.connect(GATEWAY), await world.connect(COORDINATOR)
        subject = subjects.to_coordinator(POOL, GATEWAY, "hold")
        with pytest.raises(BusTimeoutError):
            await gateway.request(subject, b"anybody?", 200)
        await coordinator.subscribe(
            subjects.received_by(POOL, "_", "hold"),
            lambda one: coordinator.publish(one.reply, one.payload.upper()),
            queue="coordinators",
        )
        answers = await asyncio.gather(
            *(gateway.request(subject, b"a%d" % index, 5_000) for index in range(50))
        )
        assert answers == [b"A%d" % index for index in range(50)]

    run(scenario)


def test_of_a_queue_group_one_member_gets_each_message(run) -> None:
    async def scenario(world: World) -> None:
        node = await world.connect(NODE)
        first, second = await world.connect(COORDINATOR), await world.connect(COORDINATOR)
        heard: list[bytes] = []
        for one in (first, second):
            await one.subscribe(
                subjects.received_by(POOL, "_"), lambda d: heard.append(d.payload), queue="co"
            )
        for index in range(40):
            node.publish(subjects.to_coordinator(POOL, NODE, "heartbeat"), b"%02d" % index)
        await until(lambda: len(heard) >= 40)
        await asyncio.sleep(0.05)
        assert sorted(heard) == [b"%02d" % index for index in range(40)]

    run(scenario)


def test_a_closed_connection_is_heard_by_the_coordinator_alone(run) -> None:
    async def scenario(world: World) -> None:
        node, coordinator = await world.connect(NODE), await world.connect(COORDINATOR)
        gone: list[str] = []
        await coordinator.subscribe_departures(gone.append)
        with pytest.raises(BusClosedError):
            await node.subscribe_departures(gone.append)
        await node.drain()
        await until(lambda: bool(gone))
        assert gone == [NODE]
        with pytest.raises(BusClosedError):
            node.publish(subjects.to_coordinator(POOL, NODE, "bye"), b"")

    run(scenario)


def test_an_ended_subscription_is_silent(run) -> None:
    async def scenario(world: World) -> None:
        coordinator, node = await world.connect(COORDINATOR), await world.connect(NODE)
        heard: list[Delivery] = []
        subscription = await node.subscribe(subjects.received_by(POOL, NODE), heard.append)
        await subscription.close()
        await node.subscribe(subjects.received_by(POOL, NODE, "deploy"), heard.append)
        coordinator.publish(subjects.subject(POOL, COORDINATOR, "rehello", NODE), b"unheard")
        coordinator.publish(subjects.subject(POOL, COORDINATOR, "deploy", NODE), b"heard")
        await until(lambda: bool(heard))
        assert [one.payload for one in heard] == [b"heard"]

    run(scenario)


COORDINATORS_VERBS = ("replicas", "settled", "notice", "regreet", "deploy", "receipts_ack")


def test_a_node_cannot_say_what_only_coordinators_say(tmp_path: Path) -> None:
    """On the real server; in memory only the name of the sender is checked."""

    async def main() -> None:
        async with nats(tmp_path) as world:
            node, gateway = await world.connect(NODE), await world.connect(GATEWAY)
            heard: list[Delivery] = []
            await gateway.subscribe(subjects.received_by(POOL, GATEWAY), heard.append)
            for verb in COORDINATORS_VERBS:
                node.publish(subjects.subject(POOL, NODE, verb, GATEWAY), b"forged")
            node.publish(subjects.subject(POOL, NODE, "frames", GATEWAY), b"honest")
            await until(lambda: bool(heard))
            await asyncio.sleep(0.05)
            assert [one.payload for one in heard] == [b"honest"]

    asyncio.run(main())


def test_bytes_that_are_no_text_do_not_deafen(tmp_path: Path) -> None:
    async def main() -> None:
        async with nats(tmp_path) as world:
            node, gateway = await world.connect(NODE), await world.connect(GATEWAY)
            heard: list[Delivery] = []

            def hear(delivery: Delivery) -> None:
                heard.append(delivery)
                if delivery.payload == b"bad":
                    raise ValueError("a handler that fails")

            await node.subscribe(subjects.received_by(POOL, NODE), hear)
            subject = subjects.subject(POOL, GATEWAY, "serve", NODE)
            gateway._client.send(subject.encode() + b"\xff", b"no text")
            gateway.publish(subject, b"bad")
            gateway.publish(subject, b"good")
            await until(lambda: bool(heard) and heard[-1].payload == b"good")

    asyncio.run(main())


def test_who_listens_to_too_much_is_cut_off(tmp_path: Path) -> None:
    async def listen(bus: Bus, ears: int) -> None:
        for index in range(ears):
            await bus.subscribe(f"{subjects.inbox_prefix(NODE)}.{index}", lambda _: None)

    async def main() -> None:
        async with nats(tmp_path) as world:
            gateway = await world.connect(GATEWAY)
            heard: list[Delivery] = []
            await gateway.subscribe(subjects.received_by(POOL, GATEWAY), heard.append)
            with pytest.raises(BusClosedError):
                await listen(await world.connect(NODE), parameters.bus_subscriptions_max * 2)
            honest = await world.connect(NODE)
            await listen(honest, 3)
            honest.publish(subjects.subject(POOL, NODE, "frames", GATEWAY), b"others work on")
            await until(lambda: bool(heard))

    asyncio.run(main())
