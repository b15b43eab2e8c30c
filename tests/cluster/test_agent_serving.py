"""docs/protocol/serving.md, the node's half, word by word."""

import asyncio
import hashlib
from pathlib import Path

import pytest

from potluck.core import parameters
from potluck.core.ids import Digest
from potluck.messages import envelope
from potluck.messages import serving as s
from potluck.simulator import engine
from tests.cluster.node_under_test import MESSAGES, MODEL, House, run


async def finished(house: House, receipt: str = "rcp_1_1") -> None:
    await house.until(lambda: receipt in house.coordinator.receipts)


def answer(tokens: int) -> bytes:
    return b"".join(engine.token(MESSAGES, at)[1] for at in range(tokens))


def test_a_request_is_accepted_streamed_ended_and_paid(tmp_path: Path) -> None:
    async def good_day(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer())
        await finished(house)
        frames = house.gateway.frames
        assert isinstance(frames[0], s.Accepted)
        assert isinstance(frames[-1], s.Done)
        assert house.gateway.text() == answer(8)
        done = house.gateway.of(s.Done)[0]
        assert (done.finish_reason, done.completion_tokens) == ("length", 8)
        receipt = house.coordinator.receipts["rcp_1_1"]
        assert receipt.outcome == "length"
        assert receipt.completion_tokens == 8
        assert receipt.prompt_tokens == engine.prompt_tokens(MESSAGES)
        # 12 prompt tokens at 0.4 and 8 at 2.0: 20.8, rounded to 21; 10 % of it, rounded down.
        assert (receipt.provider_micro, receipt.fee_micro) == (21, 2)
        assert receipt.input_digest == hashlib.sha256(MESSAGES).hexdigest()
        assert receipt.output_digest == hashlib.sha256(answer(8)).hexdigest()
        assert receipt.engine == engine.FAKE_DIGEST
        await house.until(lambda: len(house.agent.receipts) == 0)

    run(good_day, tmp_path)


def test_a_repeated_order_changes_nothing(tmp_path: Path) -> None:
    async def repeated(house: House) -> None:
        await house.serve()
        infer = house.gateway.infer()
        for _ in range(3):
            house.gateway.ask(infer)
        await finished(house)
        house.gateway.ask(infer)
        await asyncio.sleep(3)
        assert house.runtime.engines[0].generated == 8
        assert house.gateway.text() == answer(8)
        assert len(house.coordinator.receipts) == 1
        assert isinstance(house.gateway.frames[-1], s.Done)

    run(repeated, tmp_path)


def test_a_lost_chunk_is_sent_again(tmp_path: Path) -> None:
    async def gap(house: House) -> None:
        await house.serve()
        lost: list[int] = []

        def lose(item: s.ToGateway) -> bool:
            if isinstance(item, s.Chunk) and item.seq in (0, 3) and item.seq not in lost:
                lost.append(item.seq)
                return True
            return False

        house.gateway.lose = lose
        house.gateway.ask(house.gateway.infer())
        await finished(house)
        assert lost == [0, 3]
        assert house.gateway.text() == answer(8)

    run(gap, tmp_path)


def test_a_lost_last_chunk_and_a_lost_done_are_said_again(tmp_path: Path) -> None:
    async def tail(house: House) -> None:
        await house.serve()
        lost: list[s.ToGateway] = []

        def lose(item: s.ToGateway) -> bool:
            last = isinstance(item, s.Done) or (isinstance(item, s.Chunk) and item.seq == 7)
            if last and len(lost) < 3:
                lost.append(item)
                return True
            return False

        house.gateway.lose = lose
        house.gateway.ask(house.gateway.infer())
        await finished(house)
        assert house.gateway.text() == answer(8)
        await house.until(lambda: len(house.gateway.of(s.Done)) > 0)
        assert house.coordinator.receipts["rcp_1_1"].completion_tokens == 8

    run(tail, tmp_path)


def test_a_full_window_pauses_the_engine(tmp_path: Path) -> None:
    async def slow(house: House) -> None:
        await house.serve(context_tokens=1_000_000)
        house.gateway.acknowledging = False
        sampling = s.Sampling(100_000, top_logprobs=20)
        house.gateway.ask(house.gateway.infer(sampling=sampling))
        machine = house.runtime.engines[0]
        await house.until(lambda: len(house.gateway.of(s.Chunk)) > 0)
        last_seen = -1
        while machine.generated != last_seen:
            last_seen = machine.generated
            await asyncio.sleep(0.5)
            house.gateway.serve(s.Ack("req_1", 1, 0))
        sent = sum(len(one.data) + len(one.logprobs) for one in house.gateway.chunks["req_1", 1])
        assert parameters.window_bytes * 0.8 < sent < parameters.window_bytes * 1.5
        assert machine.running == 1
        for _ in range(20):
            # Slow, but alive: the last acknowledgement is repeated, and nothing is abandoned.
            await asyncio.sleep(1)
            house.gateway.serve(s.Ack("req_1", 1, 0))
        assert house.agent.counters["abandoned"] == 0
        before = machine.generated
        house.gateway.serve(s.Ack("req_1", 1, len(house.gateway.chunks["req_1", 1]) - 1))
        await house.until(lambda: machine.generated > before)

    run(slow, tmp_path, token_ms=1)


def test_cancel_stops_the_engine_and_bills_what_was_handed_on(tmp_path: Path) -> None:
    async def cancelled(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(1_000)))
        await house.until(lambda: len(house.gateway.chunks.get(("req_1", 1), [])) >= 20)
        house.gateway.acknowledging = False
        acked = house.gateway.chunks["req_1", 1][9].seq
        await asyncio.sleep(0)
        house.gateway.serve(s.Cancel("req_1", 1, 19))
        await finished(house)
        assert house.runtime.engines[0].running == 0
        assert house.runtime.engines[0].closed_early == 1
        receipt = house.coordinator.receipts["rcp_1_1"]
        assert acked == 9
        assert (receipt.outcome, receipt.completion_tokens) == ("cancelled", 20)
        assert receipt.output_digest == hashlib.sha256(answer(20)).hexdigest()

    run(cancelled, tmp_path)


def test_cancel_before_the_order_keeps_it_from_starting(tmp_path: Path) -> None:
    async def overtaken(house: House) -> None:
        await house.serve()
        house.gateway.serve(s.Cancel("req_1", 1, -1))
        house.gateway.ask(house.gateway.infer())
        await asyncio.sleep(5)
        assert house.runtime.engines[0].generated == 0
        assert house.gateway.of(s.Failed)[0].code == "cancelled"

    run(overtaken, tmp_path)


def test_a_gateway_that_falls_silent_is_given_up_after_five_seconds(tmp_path: Path) -> None:
    async def abandoned(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(100_000)))
        await house.until(lambda: house.gateway.tokens() >= 10)
        house.gateway.acknowledging = False
        shown = house.gateway.tokens()
        before = asyncio.get_running_loop().time()
        await finished(house)
        waited = asyncio.get_running_loop().time() - before
        assert 4.9 < waited < 6.5
        receipt = house.coordinator.receipts["rcp_1_1"]
        assert (receipt.outcome, receipt.completion_tokens) == ("abandoned", shown)
        assert house.runtime.engines[0].running == 0

    run(abandoned, tmp_path)


def test_silence_is_filled_with_keepalives_while_queued(tmp_path: Path) -> None:
    async def queued(house: House) -> None:
        await house.serve(slots=1)
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(600)))
        house.gateway.ask(house.gateway.infer("req_2"))
        await house.until(lambda: len(house.gateway.of(s.Done, "req_2")) > 0)
        assert house.gateway.of(s.Accepted, "req_2")[0].queue_depth == 1
        seconds = house.gateway.of(s.Done, "req_2")[0].queue_ms // 1000
        assert len(house.gateway.of(s.KeepAlive, "req_2")) >= seconds > 3

    run(queued, tmp_path)


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    async def refused(house: House) -> None:
        await house.serve(slots=1, context_tokens=64)
        gateway = house.gateway
        gateway.ask(gateway.infer("req_model", model=Digest("b" * 64)))
        gateway.ask(gateway.infer("req_long", messages=MESSAGES * 10))
        gateway.ask(gateway.infer("req_bad", sampling=s.Sampling(0)))
        await house.until(lambda: len(gateway.of(s.Failed, "req_long")) > 0)
        codes = {one.request: one.code for one in gateway.frames if isinstance(one, s.Failed)}
        assert codes == {
            "req_model": "model_not_loaded",
            "req_long": "context_length_exceeded",
            "req_bad": "malformed",
        }
        await asyncio.sleep(3)
        assert house.coordinator.receipts == {}

    run(refused, tmp_path)


def test_a_full_queue_says_busy(tmp_path: Path) -> None:
    async def crowd(house: House) -> None:
        await house.serve(slots=1)
        for number in range(parameters.node_queue_max + 2):
            house.gateway.ask(house.gateway.infer(f"req_{number}", sampling=s.Sampling(1)))
            await asyncio.sleep(0)
        await house.until(lambda: any(isinstance(one, s.Failed) for one in house.gateway.frames))
        failed = [one for one in house.gateway.frames if isinstance(one, s.Failed)]
        assert {one.code for one in failed} == {"node_busy"}
        assert len(failed) == 1

    run(crowd, tmp_path)


def test_an_engine_that_dies_mid_stream_is_said_and_billed(tmp_path: Path) -> None:
    async def dies(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(1_000)))
        await house.until(lambda: house.gateway.tokens() >= 5)
        house.runtime.engines[0].die()
        await finished(house)
        assert house.gateway.of(s.Failed)[0].code == "engine_failed"
        receipt = house.coordinator.receipts["rcp_1_1"]
        assert (receipt.outcome, receipt.completion_tokens) == ("failed", house.gateway.tokens())
        # It is started anew, by itself.
        await house.until(lambda: len(house.runtime.engines) == 2)
        await house.until(lambda: house.agent.deployments.ready(MODEL) is not None)

    run(dies, tmp_path)


def test_no_first_token_in_time(tmp_path: Path) -> None:
    async def stuck(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer())
        await house.until(lambda: len(house.gateway.of(s.Failed)) > 0)
        assert house.gateway.of(s.Failed)[0].code == "timed_out"
        assert house.runtime.engines[0].running == 0

    run(stuck, tmp_path, prefill_ms=60_000)


def test_tokens_of_one_tick_travel_together(tmp_path: Path) -> None:
    async def ticks(house: House) -> None:
        await house.serve()
        for stream, request in ((True, "req_s"), (False, "req_u")):
            infer = house.gateway.infer(request, sampling=s.Sampling(400), stream=stream)
            house.gateway.ask(infer)
            await house.until(lambda: len(house.gateway.of(s.Done, request)) > 0)  # noqa: B023
        streamed, unstreamed = (len(house.gateway.of(s.Chunk, one)) for one in ("req_s", "req_u"))
        # 400 tokens, one each millisecond.
        assert 60 < streamed <= 81
        assert unstreamed <= 2
        assert house.gateway.text("req_s") == house.gateway.text("req_u") == answer(400)

    run(ticks, tmp_path, token_ms=1)


def test_what_is_foreign_replayed_or_malformed_is_dropped_and_counted(tmp_path: Path) -> None:
    async def hostile(house: House) -> None:
        from tests.cluster.node_under_test import Gateway

        await house.serve()
        gateway, other = house.gateway, Gateway(house, "gw_2")
        first = gateway.serve(gateway.infer(sampling=s.Sampling(200)))
        await house.until(lambda: gateway.tokens() > 3)
        gateway.say_raw("serve", first)
        gateway.say_raw("serve", b"\x01short")
        gateway.say_raw("serve", gateway.stamp.seal(b"\xc1"))
        gateway.say_raw("serve", b"\x09" + gateway.stamp.seal(b"")[1:])
        other.serve(s.Cancel("req_1", 1, -1), s.Ack("req_1", 1, 0))
        other.serve(other.infer())
        gateway.say("deploy", s.Serve([]))
        gateway.say("receipts_ack", s.Serve([]))
        gateway.serve(s.Ack("req_1", 1, 10**6))
        await finished(house)
        counters = house.agent.counters
        assert counters["replayed"] == 1
        assert counters["malformed"] == 2
        assert counters["wire_version"] == 1
        assert counters["foreign"] == 5
        assert counters["acknowledged_unsent"] == 1
        assert house.coordinator.receipts["rcp_1_1"].completion_tokens == 200
        assert envelope.VERSION == 1

    run(hostile, tmp_path)


@pytest.mark.parametrize("cap_micro", [0, 5, 22])
def test_the_bill_is_capped_by_the_grant(tmp_path: Path, cap_micro: int) -> None:
    async def capped(house: House) -> None:
        await house.serve()
        infer = house.gateway.infer()
        infer.grant.max_micro = cap_micro
        house.gateway.ask(infer)
        await finished(house)
        receipt = house.coordinator.receipts["rcp_1_1"]
        assert receipt.provider_micro + receipt.fee_micro == cap_micro

    run(capped, tmp_path)
