"""Holds, receipts and countersignatures, from the wire to the books."""

import asyncio
import dataclasses
import random
from pathlib import Path

import msgspec
import pytest

from potluck.coordinator import bootstrap
from potluck.core import parameters
from potluck.core.ids import POOL, HoldId, RequestId
from potluck.core.pricing import Price
from potluck.messages import envelope, money
from potluck.messages.membership import Greet
from potluck.messages.money import Delivery, HoldRelease, HoldRenewal, HoldRequest
from tests.cluster.coordinator_under_test import (
    FOUNDING,
    MANIFEST,
    OWNER,
    PROVIDER,
    Peer,
    Pool,
    batch,
    beat,
    countersigned,
    in_pool,
    on_disk,
)

START = 10_000_000


def test_two_hundred_at_once_get_exactly_what_is_there() -> None:
    async def work(pool: Pool) -> None:
        replies = await asyncio.gather(
            *(pool.hold(1_000_000, need_micro=1_000_000) for _ in range(200))
        )
        assert sum(not reply.refusal for reply in replies) == 10
        assert {reply.refusal for reply in replies} == {"", "insufficient_funds"}
        assert await pool.available_micro() == 0

    in_pool(work)


def test_the_same_on_a_disk_with_many_receipts(tmp_path: Path) -> None:
    async def work(pool: Pool) -> None:
        replies = await asyncio.gather(
            *(pool.hold(1_000_000, need_micro=1_000_000) for _ in range(200))
        )
        held = [reply for reply in replies if not reply.refusal]
        assert len(held) == 10
        for number in range(20):
            for node in pool.nodes:
                names = [f"req_{node.id[5:10]}{number}n{leaf}" for leaf in range(20)]
                said = [pool.receipt(held[number % 10], node, name) for name in names]
                node.tell("receipts", batch(node, *said))
        async with asyncio.timeout(60):
            while await pool.posted_micro(PROVIDER) < 2 * 20 * 20 * 32:
                await asyncio.sleep(0.02)
        assert await pool.posted_micro(PROVIDER) == 2 * 20 * 20 * 32
        assert await pool.posted_micro(POOL) == 2 * 20 * 20 * 3

    on_disk(tmp_path / "potluck.db", work, nodes=2)


def test_the_good_day() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        held = await pool.hold()
        assert (held.amount_micro, held.life_ms) == (1_000_000, 600_000)
        node.tell("receipts", batch(node, pool.receipt(held, node)))
        await asyncio.sleep(0.05)
        assert await pool.posted_micro(PROVIDER) == 32
        assert await pool.posted_micro(POOL) == 3
        assert await pool.posted_micro(OWNER) == START - 35
        [ack] = node.heard("receipts_ack", money.receipts_ack_decoder)
        assert ack.accepted == ["rcp_1_1"]
        [settled] = pool.gateway.heard("settled", money.settled_decoder)
        assert settled.hold == held.hold
        assert [(one.request, one.total_micro) for one in settled.items] == [("req_1", 35)]

    in_pool(work)


def test_a_repeat_is_answered_alike_and_paid_once() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        said = batch(node, pool.receipt(await pool.hold(), node))
        for _ in range(5):
            node.tell("receipts", said)
            await asyncio.sleep(0.05)
        acks = node.heard("receipts_ack", money.receipts_ack_decoder)
        assert [ack.accepted for ack in acks] == [["rcp_1_1"]] * 5
        assert await pool.posted_micro(PROVIDER) == 32

    in_pool(work)


@pytest.mark.parametrize("seed", range(5))
def test_order_and_repeats_do_not_matter(seed: int) -> None:
    async def work(pool: Pool) -> None:
        rng = random.Random(seed)
        node = pool.nodes[0]
        held = await pool.hold()
        said = [batch(node, pool.receipt(held, node, f"req_{n}")) for n in range(8)] * 3
        rng.shuffle(said)
        for one in said:
            node.tell("receipts", one)
        await asyncio.sleep(0.5)
        assert await pool.posted_micro(PROVIDER) == 8 * 32

    in_pool(work)


def test_another_body_under_the_same_attempt_is_refused() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        held = await pool.hold()
        node.tell("receipts", batch(node, pool.receipt(held, node)))
        await asyncio.sleep(0.05)
        node.tell("receipts", batch(node, pool.receipt(held, node, completion=9)))
        await asyncio.sleep(0.05)
        last = node.heard("receipts_ack", money.receipts_ack_decoder)[-1]
        assert last.refused == [("rcp_1_1", "id_reused")]
        assert await pool.posted_micro(PROVIDER) == 32

    in_pool(work)


CHANGES = {
    "seal": ({"seal": b"0" * 16}, "forged"),
    "more than granted": ({"max_micro": 10_000}, "forged"),
    "other hold": ({"hold": HoldId("hold_none")}, "unknown_hold"),
    "overcharged": ({"provider_micro": 33}, "price_mismatch"),
    "other model": ({"model": "ef" * 32}, "digest_mismatch"),
    "negative": ({"completion_tokens": -1}, "malformed"),
    "misnamed": ({"receipt": "rcp_other_1"}, "malformed"),
    "attempt": ({"attempt": 2**63}, "malformed"),
    "other gateway": ({"gateway": "gw_other"}, "forged"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_false_receipt_is_refused_and_its_neighbour_paid(case: str) -> None:
    changes, cause = CHANGES[case]

    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        held = await pool.hold()
        false = msgspec.structs.replace(pool.receipt(held, node, "req_false"), **changes)
        node.tell("receipts", batch(node, false, pool.receipt(held, node, "req_true")))
        await asyncio.sleep(0.05)
        [ack] = node.heard("receipts_ack", money.receipts_ack_decoder)
        assert [refusal for _, refusal in ack.refused] == [cause]
        assert ack.accepted == ["rcp_true_1"]
        assert await pool.posted_micro(PROVIDER) == 32
        kept = await pool.store.transact(lambda tx: tx.receipts.list())
        assert [row.refusal for row in kept if row.refusal] == [cause]

    in_pool(work)


def test_a_forger_does_not_take_the_place_of_the_true_receipt() -> None:
    async def work(pool: Pool) -> None:
        true, forger = pool.nodes
        held = await pool.hold()
        stolen = pool.receipt(held, true)
        forger.tell("receipts", batch(forger, stolen))
        own = msgspec.structs.replace(stolen, node=forger.id)
        forger.tell("receipts", batch(forger, own))
        await asyncio.sleep(0.05)
        assert pool.coordinator.counters["forged"] == 2
        true.tell("receipts", batch(true, stolen))
        await asyncio.sleep(0.05)
        [ack] = true.heard("receipts_ack", money.receipts_ack_decoder)
        assert ack.accepted == ["rcp_1_1"]
        assert await pool.posted_micro(PROVIDER) == 32

    in_pool(work, nodes=2)


def test_a_wrong_signature_or_a_cut_message_is_dropped_and_disturbs_nobody() -> None:
    async def work(pool: Pool) -> None:
        node, other = pool.nodes
        held = await pool.hold()
        other.tell("receipts", batch(node, pool.receipt(held, node)))  # Signed by another.
        said = batch(node, pool.receipt(held, node, "req_2"))
        node.tell("receipts", said)
        whole = node.stamp.seal(envelope.encode(said))
        for cut in range(0, len(whole), 7):
            part = node.stamp.seal(envelope.encode(said))[:cut]
            node.bus.publish(f"potluck.v1.home.{node.id}.receipts._", part)
        await asyncio.sleep(0.2)
        assert await pool.posted_micro(PROVIDER) == 32
        assert pool.coordinator.counters["malformed"] > 10
        assert pool.coordinator.counters["forged"] == 1

    in_pool(work, nodes=2)


def test_all_attempts_of_a_request_together_stay_within_its_grant() -> None:
    async def work(pool: Pool) -> None:
        first, second = pool.nodes
        held = await pool.hold()
        first.tell("receipts", batch(first, pool.receipt(held, first, completion=90)))
        second.tell("receipts", batch(second, pool.receipt(held, second, attempt=2, completion=90)))
        await asyncio.sleep(0.1)
        paid = await pool.posted_micro(PROVIDER) + await pool.posted_micro(POOL)
        assert paid == 212

    in_pool(work, nodes=2)


def test_a_hold_repeated_is_the_same_and_another_body_is_refused() -> None:
    async def work(pool: Pool) -> None:
        ask = HoldRequest(hold=HoldId("hold_x"), account=OWNER, want_micro=500, need_micro=100)
        one, two = [
            money.hold_reply_decoder.decode(await pool.gateway.ask("hold", ask)) for _ in range(2)
        ]
        assert (one.amount_micro, one.grant_key) == (two.amount_micro, two.grant_key)
        other = HoldRequest(hold=HoldId("hold_x"), account=OWNER, want_micro=501, need_micro=100)
        reply = money.hold_reply_decoder.decode(await pool.gateway.ask("hold", other))
        assert reply.refusal == "id_reused"
        assert await pool.available_micro() == START - 500

    in_pool(work)


def test_a_hold_is_voided_after_life_and_grace_and_not_before() -> None:
    async def work(pool: Pool) -> None:
        await pool.hold()
        await asyncio.sleep(600 + 890)
        assert await pool.available_micro() == START - 1_000_000
        await asyncio.sleep(30)
        assert await pool.available_micro() == START

    in_pool(work)


def test_a_renewed_hold_lives_on_and_a_released_one_is_given_back() -> None:
    async def work(pool: Pool) -> None:
        held = await pool.hold()
        await asyncio.sleep(500)
        renewal = HoldRenewal(hold=held.hold)
        reply = money.hold_reply_decoder.decode(await pool.gateway.ask("renew", renewal))
        assert (reply.refusal, reply.life_ms) == ("", 600_000)
        node = pool.nodes[0]
        node.tell("heartbeat", beat())
        node.tell("receipts", batch(node, pool.receipt(held, node)))
        await asyncio.sleep(1)
        pool.gateway.tell("release", HoldRelease(hold=held.hold))
        await asyncio.sleep(1)
        assert await pool.available_micro() == START - 35
        node.tell("receipts", batch(node, pool.receipt(held, node, "req_late")))
        await asyncio.sleep(1)
        last = node.heard("receipts_ack", money.receipts_ack_decoder)[-1]
        assert last.refused == [("rcp_late_1", "hold_voided")]

    in_pool(work)


def test_a_lower_countersignature_caps_before_and_corrects_after() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        held = await pool.hold()
        early = Delivery(request=RequestId("req_a"), attempt=1, delivered_tokens=4, total_micro=20)
        late = Delivery(request=RequestId("req_b"), attempt=1, delivered_tokens=4, total_micro=20)
        gateway.tell("countersign", countersigned(gateway, early))
        await asyncio.sleep(0.1)
        said = [pool.receipt(held, node, name) for name in ("req_a", "req_b")]
        node.tell("receipts", batch(node, *said))
        await asyncio.sleep(0.1)
        assert await pool.posted_micro(OWNER) == START - 20 - 35
        gateway.tell("countersign", countersigned(gateway, late))
        gateway.tell("countersign", countersigned(gateway, late))
        await asyncio.sleep(0.1)
        assert await pool.posted_micro(OWNER) == START - 20 - 20
        feed = await pool.store.transact(lambda tx: tx.events.after(0, 1000))
        assert [event.subject for event in feed if event.kind == "receipts_differ"] == [
            "rcp_a_1",
            "rcp_b_1",
        ]
        answer = await pool.query("receipt", receipt="rcp_b_1")
        assert b'"delivered_tokens":4' in answer.data

    in_pool(work)


async def rest_micro(pool: Pool, hold: HoldId) -> int:
    row = await pool.store.transact(lambda tx: tx.holds.get(hold))
    assert row is not None
    return row.hold.rest_micro


def delivery(request: str, tokens: int, total_micro: int) -> Delivery:
    return Delivery(RequestId(request), 1, tokens, total_micro)


def test_a_correction_goes_back_into_an_open_hold_and_from_a_voided_one_to_the_account() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        held = await pool.hold(1_000)
        said = [pool.receipt(held, node, name) for name in ("req_a", "req_b")]
        node.tell("receipts", batch(node, *said))
        await asyncio.sleep(0.1)
        assert await rest_micro(pool, held.hold) == 1_000 - 70
        gateway.tell("countersign", countersigned(gateway, delivery("req_a", 8, 20)))
        await asyncio.sleep(0.1)
        assert await rest_micro(pool, held.hold) == 1_000 - 55
        assert await pool.posted_micro(OWNER) == START - 55
        assert await pool.available_micro() == START - 1_000
        gateway.tell("release", HoldRelease(hold=held.hold))
        await asyncio.sleep(0.1)
        gateway.tell("countersign", countersigned(gateway, delivery("req_b", 8, 20)))
        await asyncio.sleep(0.1)
        assert await pool.available_micro() == START - 40

    in_pool(work)


def test_tokens_that_were_not_delivered_are_not_paid_however_high_the_total() -> None:
    """Who was cut off knows the tokens, and of the total only a bound."""

    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        held = await pool.hold()
        node.tell("receipts", batch(node, pool.receipt(held, node, "req_a")))
        await asyncio.sleep(0.1)
        both = [delivery("req_a", 4, 212), delivery("req_b", 4, 212)]
        gateway.tell("countersign", countersigned(gateway, *both))
        await asyncio.sleep(0.1)
        node.tell("receipts", batch(node, pool.receipt(held, node, "req_b")))
        await asyncio.sleep(0.1)
        assert await pool.posted_micro(OWNER) == START - 2 * 26

    in_pool(work)


def test_a_false_claim_on_a_hold_makes_an_honest_one_wait_and_never_shrink() -> None:
    async def work(pool: Pool) -> None:
        liar, honest = pool.nodes
        held = await pool.hold(60)
        liar.tell("receipts", batch(liar, pool.receipt(held, liar, "req_a", completion=16)))
        await asyncio.sleep(0.1)
        true = batch(honest, pool.receipt(held, honest, "req_b"))
        honest.tell("receipts", true)
        await asyncio.sleep(0.1)
        assert honest.heard("receipts_ack", money.receipts_ack_decoder) == []
        pool.gateway.tell("countersign", countersigned(pool.gateway, delivery("req_a", 2, 500)))
        await asyncio.sleep(0.1)
        honest.tell("receipts", true)
        await asyncio.sleep(0.1)
        [ack] = honest.heard("receipts_ack", money.receipts_ack_decoder)
        assert ack.accepted == ["rcp_b_1"]
        assert await pool.posted_micro(OWNER) == START - 22 - 35

    in_pool(work, nodes=2)


def test_what_a_dead_gateway_never_said_is_shared_out_when_the_hold_ends() -> None:
    async def work(pool: Pool) -> None:
        liar, honest = pool.nodes
        held = await pool.hold(60)
        liar.tell("receipts", batch(liar, pool.receipt(held, liar, "req_a", completion=16)))
        await asyncio.sleep(0.1)
        for _ in range(2):
            honest.tell("receipts", batch(honest, pool.receipt(held, honest, "req_b")))
            await asyncio.sleep(601)
            honest.tell("heartbeat", beat())
        [ack] = honest.heard("receipts_ack", money.receipts_ack_decoder)
        assert ack.accepted == ["rcp_b_1"]
        assert await pool.posted_micro(OWNER) == START - 60

    in_pool(work, nodes=2)


def test_every_countersignature_of_a_settled_receipt_is_answered() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        held = await pool.hold()
        said = countersigned(gateway, delivery("req_a", 8, 35), delivery("req_b", 8, 35))
        gateway.tell("countersign", said)
        await asyncio.sleep(0.1)
        assert gateway.heard("settled", money.settled_decoder) == []
        both = batch(node, *(pool.receipt(held, node, name) for name in ("req_a", "req_c")))
        for _ in range(2):
            node.tell("receipts", both)
            await asyncio.sleep(0.1)
        told = gateway.heard("settled", money.settled_decoder)
        marks = [[(one.request, one.countersigned) for one in body.items] for body in told]
        assert marks == [[("req_a", True), ("req_c", False)]] * 2
        gateway.told.clear()
        said = countersigned(gateway, delivery("req_a", 8, 35), delivery("req_c", 8, 35))
        for _ in range(2):
            gateway.tell("countersign", said)
            await asyncio.sleep(0.1)
        told = gateway.heard("settled", money.settled_decoder)
        marks = [[(one.request, one.countersigned) for one in body.items] for body in told]
        assert marks == [[("req_a", True), ("req_c", True)]] * 2

    in_pool(work)


def test_another_gateway_does_not_take_the_place_of_the_true_ones_word() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        other = Peer(pool.network, "gw", 9, pool.boots)
        await other.ask("greet", Greet(public_key=other.signer.public_key, version="1"))
        held = await pool.hold()
        other.tell("countersign", countersigned(other, delivery("req_a", 0, 0)))
        await asyncio.sleep(0.1)
        gateway.tell("countersign", countersigned(gateway, delivery("req_a", 4, 20)))
        await asyncio.sleep(0.1)
        node.tell("receipts", batch(node, pool.receipt(held, node, "req_a")))
        await asyncio.sleep(0.1)
        assert await pool.posted_micro(OWNER) == START - 20
        other.tell("countersign", countersigned(other, delivery("req_a", 0, 0)))
        await asyncio.sleep(0.1)
        assert await pool.posted_micro(OWNER) == START - 20

    in_pool(work)


def test_evidence_of_one_node_is_bounded_and_it_is_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameters, "evidence_per_node_max", 5)

    async def work(pool: Pool) -> None:
        node, other = pool.nodes
        held = await pool.hold()
        for one in (node, other):
            false = [pool.receipt(held, one, f"req_{n}", seal=b"0" * 16) for n in range(9)]
            one.tell("receipts", batch(one, *false))
            await asyncio.sleep(0.1)
            [ack] = one.heard("receipts_ack", money.receipts_ack_decoder)
            assert len(ack.refused) == 9
        kept = await pool.store.transact(lambda tx: tx.receipts.list())
        assert sorted(row.node for row in kept) == sorted([node.id, other.id] * 5)

    in_pool(work, nodes=2)


def test_a_receipt_that_is_too_long_is_refused_by_name_and_its_neighbours_paid() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        held = await pool.hold()
        long = pool.receipt(held, node, "req_a", outcome="x" * 5_000)
        node.tell("receipts", batch(node, long, pool.receipt(held, node, "req_b"), b"no receipt"))
        await asyncio.sleep(0.1)
        [ack] = node.heard("receipts_ack", money.receipts_ack_decoder)
        assert (ack.accepted, ack.refused) == (["rcp_b_1"], [("rcp_a_1", "malformed")])
        assert await pool.posted_micro(PROVIDER) == 32

    in_pool(work)


def test_what_was_sealed_at_an_earlier_price_is_paid_at_it() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        held = await pool.hold()
        dearer = Price(input_micro_per_mtok=1, output_micro_per_mtok=2, fee_basis_points=0)
        for changed in (
            dataclasses.replace(FOUNDING, price=dearer),
            dataclasses.replace(
                FOUNDING, manifest=msgspec.structs.replace(MANIFEST, name="m", digest="ef" * 32)
            ),
        ):
            await pool.store.transact(lambda tx, f=changed: bootstrap.ensure(tx, f, 2, pool.boots))  # type: ignore[misc]
            name = f"req_{changed.manifest.name}"
            node.tell("receipts", batch(node, pool.receipt(held, node, name)))
            await asyncio.sleep(0.1)
        assert await pool.posted_micro(PROVIDER) == 64

    in_pool(work)


def test_a_higher_countersignature_changes_nothing() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        node.tell("receipts", batch(node, pool.receipt(await pool.hold(), node)))
        await asyncio.sleep(0.1)
        more = Delivery(request=RequestId("req_1"), attempt=1, delivered_tokens=99, total_micro=200)
        gateway.tell("countersign", countersigned(gateway, more))
        await asyncio.sleep(0.1)
        assert await pool.posted_micro(OWNER) == START - 35

    in_pool(work)


def test_nobody_speaks_for_others() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        request = HoldRequest(hold=HoldId("hold_n"), account=OWNER, want_micro=5, need_micro=1)
        reply = money.hold_reply_decoder.decode(await node.ask("hold", request))
        assert reply.refusal == "forbidden"
        assert await pool.available_micro() == START

    in_pool(work)
