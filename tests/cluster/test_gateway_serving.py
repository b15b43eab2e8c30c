"""The real serving code on virtual time, with a scripted coordinator and scripted nodes."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from potluck.adapters.keys import Ed25519Signer, Ed25519Verifier
from potluck.core import grants, merkle, parameters
from potluck.core.ids import gateway_id
from potluck.core.pricing import Price
from potluck.core.refusals import Refusal
from potluck.gateway.serving.asks import ChatAsk
from potluck.gateway.serving.requests import Completion, Piece
from potluck.gateway.serving.serving import Serving
from potluck.messages.membership import Notice, Replicas
from potluck.messages.money import (
    COUNTERSIGN_DOMAIN,
    Countersignature,
    Settled,
    Settlement,
    delivery_decoder,
)
from potluck.messages.serving import Failed, Frames, Infer, KeepAlive, Sampling
from potluck.simulator.clock import LoopClock
from potluck.simulator.ids import SeededIds
from potluck.simulator.loop import VirtualTimeLoop
from potluck.simulator.network import Network
from tests.cluster import scripted_pool as script
from tests.cluster.scripted_pool import (
    ALICE,
    KEY,
    POOL,
    Coordinator,
    Node,
    chunk,
    done,
    good_day,
    sha,
)

SIGNER = Ed25519Signer(b"g" * 32)
ME = gateway_id(SIGNER.public_key)
MESSAGES = b'[{"role":"user","content":"' + b"x" * (96 - 30) + b'"}]'


@dataclass
class Reader:
    """A listener that drains at once, unless told not to."""

    completion: Completion | None = None
    reading: bool = True
    pieces: list[Piece] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    quiets: int = 0

    def wake(self) -> None:
        assert self.completion is not None
        if self.reading and self.completion.failure is None:
            self.pieces += self.completion.drain()
        if self.completion.ended or self.completion.failure:
            self.ended.set()

    def quiet(self) -> None:
        self.quiets += 1

    def broken(self) -> None:
        self.ended.set()

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass
class World:
    network: Network
    coordinator: Coordinator
    nodes: list[Node]
    serving: Serving

    async def ask(self, ask: ChatAsk | None = None, **reader: Any) -> Reader | Refusal:
        key = self.serving.key_cached(sha(KEY)) or await self.serving.keys.find(sha(KEY))
        if isinstance(key, Refusal):
            return key
        listener = Reader(**reader)
        result = await self.serving.submit(ask or an_ask(), key, listener)
        if isinstance(result, Refusal):
            return result
        listener.completion = result
        return listener

    async def whole(self, ask: ChatAsk | None = None) -> Reader:
        reader = await self.ask(ask)
        assert isinstance(reader, Reader)
        await reader.ended.wait()
        await asyncio.sleep(0)
        return reader

    def check_money(self) -> None:
        for held in self.serving.purses.all():
            purse = held.purse
            assert purse.outstanding_micro == sum(held.expected_micro.values())
        if not len(self.serving.conversations):
            assert all(h.purse.granted_micro == 0 for h in self.serving.purses.all())
            assert self.serving.limits.in_flight == 0
            assert not any(self.serving.conversations.in_flight.values())


def an_ask(**changes: Any) -> ChatAsk:
    values: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "max_tokens": 64,
        "sampling": Sampling(max_tokens=64), "stream": True,
    }  # fmt: skip
    return ChatAsk(**{**values, **changes})


def play(
    test: Callable[[World], Awaitable[None]],
    *scripts: script.Script,
    available_micro: int = 10_000_000,
    ready: bool = True,
    away: bool = False,
) -> None:
    async def run() -> None:
        network = Network()
        names = [f"node_{letter}" for letter in "ABCD"[: len(scripts)]]
        coordinator = Coordinator(
            network.bus("co_1", privileged=True),
            [script.replica(name) for name in names],
            available_micro,
        )
        coordinator.away = away
        await coordinator.start()
        nodes = [Node(network.bus(n), n, s) for n, s in zip(names, scripts, strict=True)]
        for node in nodes:
            await node.start()
        serving = Serving(
            pool=POOL, signer=SIGNER, bus=network.bus(ME), clock=LoopClock(),
            ids=SeededIds(random.Random(7)),
        )  # fmt: skip
        await serving.start()
        while ready and not serving.ready:
            await asyncio.sleep(0.01)
        world = World(network, coordinator, nodes, serving)
        await test(world)
        world.check_money()
        await serving.stop(0)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


async def mute(_node: Node, _infer: Infer) -> None:
    return None


def test_good_day_has_the_protocols_amounts() -> None:
    async def test(world: World) -> None:
        reader = await world.ask()
        assert isinstance(reader, Reader)
        held = world.serving.purses.all()[0]
        assert held.purse.granted_micro == 212
        await reader.ended.wait()
        await asyncio.sleep(0.05)
        assert reader.text == "Once upon a time"
        assert reader.pieces[-1].finish == "stop"
        assert reader.completion is not None
        assert reader.completion.usage.cost_micro == 35
        assert (held.purse.free_micro, held.purse.outstanding_micro) == (1_000_000 - 35, 35)
        node = world.nodes[0]
        assert node.last_ack() == 3
        infer = node.infers[0]
        seal = grants.seal(
            script.GRANT_KEY, request=infer.request, attempt=1, node=node.me,  # type: ignore[arg-type]
            hold=held.purse.hold, boot=world.serving.boot, max_micro=212, bill_prompt=True,
            price=Price(input_micro_per_mtok=400_000, output_micro_per_mtok=2_000_000,
                        fee_basis_points=1_000),
        )  # fmt: skip
        assert infer.grant.seal == seal
        for _ in range(2):  # Told twice is harmless.
            world.coordinator.settle(ME, held.purse.hold, infer.request, 1, 35)
        await asyncio.sleep(0.01)
        assert held.purse.settled_micro == 35
        assert held.purse.outstanding_micro == 0

    play(test, good_day)


def test_countersignature_is_signed_and_says_what_was_delivered() -> None:
    async def test(world: World) -> None:
        reader = await world.whole()
        await asyncio.sleep(1.2)
        word = world.coordinator.of("countersign")[0]
        assert isinstance(word, Countersignature)
        assert merkle.root(word.deliveries) == word.root
        message = COUNTERSIGN_DOMAIN + word.root
        assert Ed25519Verifier().verify(SIGNER.public_key, word.signature, message)
        delivery = delivery_decoder.decode(word.deliveries[0])
        assert reader.completion is not None
        assert (delivery.delivered_tokens, delivery.total_micro) == (8, 35)

    play(test, good_day)


def test_not_accepted_is_tried_on_another_node() -> None:
    async def test(world: World) -> None:
        reader = await world.whole()
        assert reader.text == "Once upon a time"
        assert world.nodes[0].cancels[0].acked_seq == -1
        assert len(world.nodes[0].infers) == 2  # Said once more before giving up.
        assert world.nodes[1].infers[0].attempt == 2
        assert world.nodes[1].infers[0].request == world.nodes[0].infers[0].request
        assert world.nodes[1].infers[0].grant.seal != world.nodes[0].infers[0].grant.seal

    play(test, mute, good_day)


def test_busy_node_is_passed_over_and_the_last_refusal_is_shown() -> None:
    async def busy(node: Node, infer: Infer) -> None:
        node.say(Failed(infer.request, infer.attempt, "node_busy", "full"))

    async def test(world: World) -> None:
        reader = await world.whole()
        assert reader.completion is not None
        assert reader.completion.failure is not None
        assert reader.completion.failure.refusal is Refusal.NODE_BUSY
        assert sum(len(node.infers) for node in world.nodes) == 3

    play(test, busy, busy, busy)


def test_the_askers_fault_is_not_tried_elsewhere() -> None:
    async def too_long(node: Node, infer: Infer) -> None:
        node.say(Failed(infer.request, infer.attempt, "context_length_exceeded", "too long"))

    async def test(world: World) -> None:
        reader = await world.whole()
        assert reader.completion is not None
        assert reader.completion.failure is not None
        assert reader.completion.failure.refusal is Refusal.CONTEXT_LENGTH_EXCEEDED
        assert len(world.nodes[1].infers) == 0

    play(test, too_long, good_day)


def test_silence_after_the_first_token_ends_with_an_error_and_pays_what_was_shown() -> None:
    async def dies(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer), chunk(infer, 0, b"Once", 2))

    async def test(world: World) -> None:
        reader = await world.whole()
        assert reader.text == "Once"
        assert reader.completion is not None
        assert reader.completion.failure is not None
        assert reader.completion.failure.refusal is Refusal.NODE_LOST
        assert not world.nodes[1].infers
        await asyncio.sleep(0.01)
        assert world.nodes[0].cancels[0].acked_seq == 0

    play(test, dies, good_day)


def test_gap_is_resent_and_repeats_are_dropped() -> None:
    async def lossy(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer), chunk(infer, 0, b"a"), chunk(infer, 2, b"c"))
        while not node.resends:
            await asyncio.sleep(0.001)
        assert node.resends[0].from_seq == 1
        node.say(chunk(infer, 0, b"a"), chunk(infer, 1, b"b"), chunk(infer, 2, b"c"))
        node.say(done(infer, 3, completion=4))
        await asyncio.sleep(0.2)
        node.say(chunk(infer, 3, b"d"))

    async def test(world: World) -> None:
        reader = await world.whole()
        assert reader.text == "abcd"
        assert {r.from_seq for r in world.nodes[0].resends} == {1, 3}

    play(test, lossy)


def test_repeated_done_is_answered_with_the_same_closing_ack() -> None:
    async def test(world: World) -> None:
        await world.whole()
        node = world.nodes[0]
        await asyncio.sleep(0.01)
        before = len(node.acks)
        payload = node.say(done(node.infers[0], 3))
        await asyncio.sleep(0.01)
        assert len(node.acks) == before + 1
        assert node.acks[-1].seq == 3
        subject = f"potluck.v1.{POOL}.node_A.frames.{ME}"
        node.bus.publish(subject, payload)  # The very same message: a replay, dropped.
        await asyncio.sleep(0.01)
        assert len(node.acks) == before + 1

    play(test, good_day)


def test_another_nodes_frames_change_nothing() -> None:
    async def test(world: World) -> None:
        reader = await world.ask()
        assert isinstance(reader, Reader)
        await asyncio.sleep(0.001)
        thief = world.nodes[1]
        thief.gateway = ME
        infer = world.nodes[0].infers[0]
        thief.say(chunk(infer, 1, b"forged"), done(infer, 1))
        await reader.ended.wait()
        assert reader.text == "Once upon a time"

    play(test, good_day, mute)


def test_split_characters_wait_for_their_rest() -> None:
    async def split(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer), chunk(infer, 0, b"caf\xc3"))
        await asyncio.sleep(0.01)
        node.say(chunk(infer, 1, b"\xa9"), done(infer, 1, completion=2))

    async def test(world: World) -> None:
        reader = await world.whole()
        assert [piece.text for piece in reader.pieces] == ["caf", "é"]

    play(test, split)


async def endless(node: Node, infer: Infer) -> None:
    node.say(script.accepted(infer))
    seq = 0
    for _ in range(20_000):
        if seq - node.last_ack() <= 32 and not node.cancels:
            node.say(chunk(infer, seq, b"y" * 1024))
            seq += 1
        else:
            node.say(KeepAlive(infer.request, infer.attempt))
        if node.cancels:
            return
        await asyncio.sleep(0.01 if seq - node.last_ack() <= 32 else 1.0)


def test_client_that_leaves_cancels_and_pays_what_was_handed_on() -> None:
    async def test(world: World) -> None:
        reader = await world.ask()
        assert isinstance(reader, Reader)
        assert reader.completion is not None
        while len(reader.pieces) < 3:
            await asyncio.sleep(0.005)
        reader.completion.cancel()
        await asyncio.sleep(0.05)
        node = world.nodes[0]
        assert node.cancels[0].acked_seq >= 2
        held = world.serving.purses.all()[0]
        assert held.purse.outstanding_micro > 0
        world.coordinator.settle(ME, held.purse.hold, node.infers[0].request, 1, 3)
        await asyncio.sleep(0.01)
        assert held.purse.free_micro == held.purse.amount_micro - 3

    play(test, endless)


def test_slow_client_pauses_the_node_and_is_given_up_after_its_time() -> None:
    async def test(world: World) -> None:
        reader = await world.ask()
        assert isinstance(reader, Reader)
        assert reader.completion is not None
        await asyncio.sleep(0.1)
        reader.reading = False
        await asyncio.sleep(30)
        life = reader.completion.lives[0]
        assert life.pending_bytes <= parameters.window_bytes
        assert reader.completion.failure is None
        acks_before = len(world.nodes[0].acks)
        await asyncio.sleep(5)
        assert len(world.nodes[0].acks) > acks_before  # The last one again: we live.
        await reader.ended.wait()
        assert reader.completion.failure is not None
        assert reader.completion.failure.refusal is Refusal.CLIENT_TOO_SLOW
        assert world.nodes[0].acks

    play(test, endless)


def test_node_that_ignores_its_window_is_cut_off() -> None:
    async def flood(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer))
        for seq in range(64):
            node.say(chunk(infer, seq, b"z" * 8192))

    async def test(world: World) -> None:
        reader = await world.ask(reading=False)
        assert isinstance(reader, Reader)
        await reader.ended.wait()
        assert reader.completion is not None
        assert reader.completion.failure is not None
        assert reader.completion.failure.refusal is Refusal.STREAM_BROKEN

    play(test, flood)


def test_a_claim_of_more_than_was_delivered_is_billed_as_delivered() -> None:
    async def liar(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer), chunk(infer, 0, b"hi", 2))
        node.say(done(infer, 0, prompt=40, completion=60))

    async def test(world: World) -> None:
        reader = await world.whole()
        assert reader.completion is not None
        assert reader.completion.usage.completion_tokens == 2
        assert reader.completion.usage.cost_micro == 22

    play(test, liar)


def test_fifty_at_once_open_one_hold() -> None:
    async def test(world: World) -> None:
        world.coordinator.hold_delay_s = 0.1
        readers = await asyncio.gather(*[world.ask() for _ in range(50)])
        assert all(isinstance(reader, Reader) for reader in readers)
        assert world.coordinator.count("hold") == 1
        assert world.coordinator.count("query") == 1
        for reader in readers:
            assert isinstance(reader, Reader)
            await reader.ended.wait()

    play(test, good_day)


def test_near_exhaustion_only_what_is_there_is_spent() -> None:
    async def test(world: World) -> None:
        results = await asyncio.gather(*[world.ask() for _ in range(20)])
        readers = [one for one in results if isinstance(one, Reader)]
        assert len(readers) == 4  # 4 × 212 of 1,000.
        assert {one for one in results if isinstance(one, Refusal)} == {Refusal.INSUFFICIENT_FUNDS}
        for reader in readers:
            await reader.ended.wait()
        purses = [held.purse for held in world.serving.purses.all()]
        assert sum(purse.amount_micro for purse in purses) <= 1_000

    play(test, good_day, available_micro=1_000)


def test_below_half_a_block_another_is_opened_beside() -> None:
    async def test(world: World) -> None:
        big = an_ask(max_tokens=None, messages=b"x" * 1_300_000)
        reader = await world.ask(big)
        assert isinstance(reader, Reader)
        await reader.ended.wait()
        assert world.coordinator.count("hold") >= 1
        small = await world.whole()
        await asyncio.sleep(0.1)
        assert small.text
        assert sum(h.purse.free_micro for h in world.serving.purses.all()) >= 500_000

    play(test, good_day)


def test_holds_are_renewed_while_in_use_and_released_when_idle() -> None:
    async def test(world: World) -> None:
        reader = await world.whole()
        assert reader.completion is not None
        held = world.serving.purses.all()[0]
        infer = world.nodes[0].infers[0]
        world.coordinator.settle(ME, held.purse.hold, infer.request, 1, 35)
        await asyncio.sleep(130)
        assert world.coordinator.count("renew") == 1
        await asyncio.sleep(parameters.hold_life_ms / 1000)
        assert world.coordinator.count("release") == 1
        assert not world.serving.purses.all()

    play(test, good_day)


def test_coordinator_away_new_money_waits_then_is_refused_and_held_money_flows() -> None:
    async def test(world: World) -> None:
        await world.whole()
        world.coordinator.away = True
        again = await world.whole()
        assert again.text == "Once upon a time"
        loop = asyncio.get_running_loop()
        before = loop.time()
        refused = await world.ask(an_ask(messages=b"x" * 3_000_000))
        assert refused is Refusal.COORDINATOR_UNAVAILABLE
        assert 1.9 <= loop.time() - before <= 2.6

    play(test, good_day)


def test_never_greeted_is_not_ready_and_says_why() -> None:
    async def test(world: World) -> None:
        await asyncio.sleep(10)
        assert not world.serving.ready
        assert await world.serving.keys.find(sha(KEY)) is Refusal.COORDINATOR_UNAVAILABLE
        world.coordinator.away = False
        await asyncio.sleep(5)
        assert world.serving.ready

    play(test, good_day, ready=False, away=True)


def test_keys_expire_by_the_monotonic_clock_and_revocation_is_noticed() -> None:
    async def test(world: World) -> None:
        world.coordinator.keys[sha(KEY)] = script.key_record(lives_ms=5_000)
        assert isinstance(await world.ask(), Reader)
        assert not isinstance(world.serving.key_cached(sha(KEY)), Refusal)
        await asyncio.sleep(5.1)
        assert world.serving.key_cached(sha(KEY)) is Refusal.EXPIRED_KEY
        world.coordinator.keys[sha(KEY)] = "revoked_key"
        notice = Notice(kind="key", name=sha(KEY))
        world.coordinator.speaker.tell("notice", ME, notice)
        await asyncio.sleep(0.01)
        assert world.serving.key_cached(sha(KEY)) is None
        assert await world.ask() is Refusal.REVOKED_KEY

    play(test, good_day)


def test_unknown_keys_are_remembered_too() -> None:
    async def test(world: World) -> None:
        digest = sha("pk_nobody")
        assert await world.serving.keys.find(digest) is Refusal.INVALID_KEY
        assert world.serving.key_cached(digest) is Refusal.INVALID_KEY
        await asyncio.sleep(parameters.key_cache_ms / 1000 + 1)
        assert world.serving.key_cached(digest) is None

    play(test, good_day)


def test_a_gap_in_the_replica_table_asks_for_the_whole() -> None:
    async def test(world: World) -> None:
        greeted = world.coordinator.count("greet")
        world.coordinator.replicas = [script.replica("node_A", model="other")]
        world.coordinator.offset = 9
        delta = Replicas(epoch="e1", follows=7, offset=9, whole=False, changed=[], removed=[])
        world.coordinator.speaker.tell("replicas", ME, delta)
        await asyncio.sleep(0.1)
        assert world.coordinator.count("greet") == greeted + 1
        assert world.serving.table.models == ["other"]
        assert await world.ask() is Refusal.MODEL_NOT_FOUND

    play(test, good_day)


def test_choices_are_requests_of_their_own_and_the_prompt_is_billed_once() -> None:
    async def test(world: World) -> None:
        reader = await world.whole(an_ask(choices=3))
        node = world.nodes[0]
        assert len({infer.request for infer in node.infers}) == 3
        assert [infer.bill_prompt for infer in node.infers] == [True, False, False]
        assert reader.completion is not None
        usage = reader.completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, 24)
        assert usage.cost_micro == 35 + 17 + 17
        assert {piece.index for piece in reader.pieces if piece.finish} == {0, 1, 2}

    play(test, good_day)


def test_a_key_has_a_limit_of_its_own() -> None:
    async def test(world: World) -> None:
        readers = [await world.ask() for _ in range(parameters.requests_per_key_in_flight_max)]
        assert await world.ask() is Refusal.RATE_LIMITED
        for reader in readers:
            assert isinstance(reader, Reader)
            assert reader.completion is not None
            reader.completion.cancel()
        assert isinstance(await world.ask(), Reader)

    async def waits(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer))
        await asyncio.sleep(1)
        await good_day(node, infer)

    async def with_rest(world: World) -> None:
        await test(world)
        await asyncio.sleep(3)

    play(with_rest, waits)


def test_stop_lets_streams_end_and_refuses_what_is_new() -> None:
    async def test(world: World) -> None:
        reader = await world.ask()
        assert isinstance(reader, Reader)
        stopping = asyncio.create_task(world.serving.stop(10_000))
        await asyncio.sleep(0)
        assert await world.ask() is Refusal.SHUTTING_DOWN
        await stopping
        assert reader.text == "Once upon a time"

    play(test, good_day)


@pytest.mark.parametrize("lost", range(1, 9))
def test_any_one_lost_frame_is_repaired(lost: int) -> None:
    async def careful(node: Node, infer: Infer) -> None:
        sent = []

        def say(item: Any) -> None:
            sent.append(item)
            if len(sent) != lost:
                node.say(item)

        say(script.accepted(infer))
        for seq, word in enumerate((b"Once", b" upon", b" a", b" time")):
            say(chunk(infer, seq, word, 2))
            await asyncio.sleep(0.005)
        for _ in range(5):
            say(done(infer, 3))
            await asyncio.sleep(0.3)
            for resend in node.resends:
                for item in sent:
                    if isinstance(item, script.Chunk) and item.seq >= resend.from_seq:
                        node.say(item)

    async def test(world: World) -> None:
        reader = await world.whole()
        assert reader.text == "Once upon a time"
        assert reader.completion is not None
        assert reader.completion.usage.cost_micro == 35

    play(test, careful)


def test_money_is_held_for_alice_only() -> None:
    async def test(world: World) -> None:
        await world.whole()
        assert {held.account for held in world.serving.purses.all()} == {ALICE}

    play(test, good_day)


def test_a_node_has_no_word_in_money_keys_or_the_table() -> None:
    async def test(world: World) -> None:
        reader = await world.whole()
        held = world.serving.purses.all()[0]
        node, request = world.nodes[0], world.nodes[0].infers[0].request
        item = Settlement(request=request, attempt=1, total_micro=0)
        node.speaker.tell("settled", ME, Settled(hold=held.purse.hold, items=[item]))
        gone = Replicas(epoch="e1", follows=1, offset=2, whole=True, changed=[], removed=[])
        node.speaker.tell("replicas", ME, gone)
        node.speaker.tell("notice", ME, Notice(kind="key", name=sha(KEY)))
        await asyncio.sleep(0.01)
        assert held.purse.outstanding_micro == 35
        assert world.serving.table.models == ["tiny"]
        assert world.serving.key_cached(sha(KEY)) is not None
        infer = world.nodes[0].infers[0]
        world.coordinator.speaker.tell("frames", ME, Frames(items=[done(infer, 3)]))
        await asyncio.sleep(0.01)
        assert reader.text == "Once upon a time"

    play(test, good_day)


async def loses_the_first(node: Node, infer: Infer) -> None:
    """The first attempt dies in the middle of its answer."""
    node.say(script.accepted(infer))
    node.say(chunk(infer, 0, b"Once", 2))
    if infer.attempt > 1:
        await good_day(node, infer)


def test_an_unstreamed_answer_is_tried_again_until_all_of_it_is_there() -> None:
    async def test(world: World) -> None:
        reader = await world.whole(an_ask(stream=False))
        assert reader.text == "Once upon a time"
        assert reader.completion is not None
        assert reader.completion.usage.cost_micro == 35
        first = next(node for node in world.nodes if node.infers[0].attempt == 1)
        assert [cancel.acked_seq for cancel in first.cancels] == [-1]
        assert all(ack.seq == -1 for ack in first.acks), "acknowledged is billed"

    play(test, loses_the_first, loses_the_first)


def test_an_unstreamed_answer_that_fails_costs_nothing() -> None:
    async def second_dies(node: Node, infer: Infer) -> None:
        if infer.bill_prompt:
            await good_day(node, infer)
        else:
            node.say(script.accepted(infer), chunk(infer, 0, b"Once", 2))

    async def test(world: World) -> None:
        reader = await world.whole(an_ask(stream=False, choices=2))
        assert reader.completion is not None
        assert reader.completion.failure is not None
        assert reader.completion.failure.refusal is Refusal.NODE_LOST
        assert reader.pieces == []
        held = world.serving.purses.all()[0]
        assert held.purse.outstanding_micro == 0
        await asyncio.sleep(1.2)
        signed = [one for body in world.coordinator.of("countersign") for one in body.deliveries]  # type: ignore[attr-defined]
        assert all(delivery_decoder.decode(one).total_micro == 0 for one in signed)

    play(test, second_dies)


def test_who_leaves_before_an_unstreamed_answer_pays_nothing() -> None:
    async def half(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer), chunk(infer, 0, b"Once", 2))

    async def test(world: World) -> None:
        reader = await world.ask(an_ask(stream=False))
        assert isinstance(reader, Reader)
        await asyncio.sleep(0.3)
        assert reader.completion is not None
        reader.completion.cancel()
        await asyncio.sleep(0.01)
        assert [cancel.acked_seq for cancel in world.nodes[0].cancels] == [-1]
        assert world.serving.purses.all()[0].purse.outstanding_micro == 0

    play(test, half)


def test_a_long_unstreamed_answer_keeps_its_node_going() -> None:
    async def long(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer))
        for seq in range(40):
            while (seq - node.last_ack()) * 4096 > parameters.window_bytes:
                await asyncio.sleep(0.01)
            node.say(chunk(infer, seq, b"z" * 4096, 1))
        node.say(done(infer, 39, completion=40))

    async def test(world: World) -> None:
        reader = await world.whole(an_ask(stream=False))
        assert len(reader.text) == 40 * 4096

    play(test, long)


@pytest.mark.parametrize(("context_tokens", "slots"), [(-(10**6), 4), (10**9, 4), (2048, -1)])
def test_absurd_replicas_are_not_routed_to_and_no_slot_leaks(
    context_tokens: int, slots: int
) -> None:
    async def test(world: World) -> None:
        world.coordinator.replicas = [
            script.replica("node_A", context_tokens=context_tokens, slots=slots)
        ]
        world.coordinator.offset = 2
        world.coordinator.speaker.tell("replicas", ME, world.coordinator.table())
        await asyncio.sleep(0.01)
        for _ in range(parameters.requests_per_key_in_flight_max + 1):
            assert await world.ask(an_ask(max_tokens=None)) is Refusal.MODEL_NOT_FOUND
        assert world.serving.limits.in_flight == 0

    play(test, good_day)


def test_more_tokens_than_asked_for_and_empty_chunks_are_cut_off() -> None:
    async def too_many(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer), chunk(infer, 0, b"", 65))

    async def empty(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer))
        while not node.cancels:
            seq = len(said)
            said.append(seq)
            node.say(*[chunk(infer, seq * 100 + at, b"", 0) for at in range(100)])
            await asyncio.sleep(0.001)

    said: list[int] = []

    async def test(world: World) -> None:
        reader = await world.ask(an_ask(), reading=False)
        assert isinstance(reader, Reader)
        await reader.ended.wait()
        assert reader.completion is not None
        assert reader.completion.failure is not None
        assert reader.completion.failure.refusal is Refusal.STREAM_BROKEN

    play(test, too_many)
    play(test, empty)


def test_large_orders_of_one_turn_all_arrive() -> None:
    async def test(world: World) -> None:
        largest = 0
        publish = world.serving._bus.publish  # noqa: SLF001

        def measured(subject: str, payload: bytes) -> None:
            nonlocal largest
            largest = max(largest, len(payload))
            publish(subject, payload)

        world.serving._bus.publish = measured  # type: ignore[method-assign]  # noqa: SLF001
        await world.whole()  # The key and the money are here.
        ask = an_ask(messages=b"x" * (parameters.infer_alone_bytes - 1), max_tokens=1)
        await asyncio.gather(*[world.ask(ask) for _ in range(64)])
        await asyncio.sleep(0.1)
        assert len({infer.request for infer in world.nodes[0].infers}) == 65
        assert largest <= parameters.batch_bytes_max + parameters.infer_alone_bytes

    play(test, good_day, available_micro=100_000_000)


def test_countersignatures_are_repeated_until_they_are_stored() -> None:
    async def test(world: World) -> None:
        await world.whole()
        held = world.serving.purses.all()[0]
        request = world.nodes[0].infers[0].request
        await asyncio.sleep(3)
        assert world.coordinator.count("countersign") == 1
        await asyncio.sleep(5)
        assert world.coordinator.count("countersign") == 2, "lost, it is said again"
        item = Settlement(request=request, attempt=1, total_micro=35)
        for countersigned in (False, True):
            item.countersigned = countersigned
            settled = Settled(hold=held.purse.hold, items=[item])
            world.coordinator.speaker.tell("settled", ME, settled)
            await asyncio.sleep(15)
            assert world.coordinator.count("countersign") == 3
        await asyncio.sleep(600)
        assert world.coordinator.count("countersign") == 3

    play(test, good_day)


def test_countersignatures_nobody_answers_end() -> None:
    async def test(world: World) -> None:
        await world.whole()
        await asyncio.sleep(parameters.countersign_repeat_for_ms / 1000 + 60)
        count = world.coordinator.count("countersign")
        assert 15 <= count <= 30
        await asyncio.sleep(600)
        assert world.coordinator.count("countersign") == count

    play(test, good_day)


def test_a_stall_of_our_own_is_nobodys_silence() -> None:
    async def slow(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer))
        await asyncio.sleep(0.3)
        node.say(chunk(infer, 0, b"Once", 2))
        await asyncio.sleep(3.4)
        node.say(chunk(infer, 1, b" upon", 2), done(infer, 1))

    async def test(world: World) -> None:
        clock = world.serving.clock
        sleep_ms = clock.sleep_ms
        stalled: list[int] = []

        async def stalls(ms: int) -> None:
            """What SIGSTOP does: one sleep takes three seconds more."""
            late = 3_000 if clock.now_ms() - begun_ms > 400 and not stalled else 0
            if late:
                stalled.append(late)
            await sleep_ms(ms + late)

        begun_ms = clock.now_ms()
        clock.sleep_ms = stalls  # type: ignore[method-assign]
        reader = await world.whole()
        assert stalled
        assert reader.text == "Once upon"

    play(test, slow)


def test_invented_keys_are_not_all_asked_about() -> None:
    async def test(world: World) -> None:
        world.coordinator.away = True
        many = [world.serving.keys.find(sha(f"pk_{index}")) for index in range(500)]
        refused = await asyncio.gather(*many)
        assert refused.count(Refusal.OVERLOADED) == 500 - parameters.keys_asking_max

    play(test, good_day)


def test_an_answer_that_cannot_be_written_ends() -> None:
    class Broken(Reader):
        def wake(self) -> None:
            raise OSError("no")

    async def test(world: World) -> None:
        key = world.serving.key_cached(sha(KEY)) or await world.serving.keys.find(sha(KEY))
        reader = Broken()
        result = await world.serving.submit(an_ask(), key, reader)  # type: ignore[arg-type]
        assert isinstance(result, Completion)
        await asyncio.wait_for(reader.ended.wait(), 5)

    play(test, good_day)
