"""What peers may fill, how long they are remembered, and clocks that jump."""

import asyncio
import dataclasses
import logging

import msgspec
import pytest

from potluck.coordinator import bootstrap
from potluck.core import parameters
from potluck.core.ids import AccountId
from potluck.messages import membership, money, queries
from potluck.messages.membership import Accelerator, Greet
from potluck.simulator.network import perfect
from tests.cluster.coordinator_under_test import (
    DIGEST,
    FOUNDING,
    INVENTORY,
    MANIFEST,
    OWNER,
    PROVIDER,
    Peer,
    Pool,
    batch,
    beat,
    hello,
    in_pool,
)

START = 10_000_000


async def key(pool: Pool, number: int, account: AccountId = OWNER, **words: str) -> queries.Answer:
    digest = f"{number:064x}"
    words = {"account": account, "name": "k", "hash": digest, **words}
    return await pool.command(f"cmd_{number}", "create_key", **words)


def test_an_account_has_so_many_valid_keys_and_forgets_the_oldest_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameters, "keys_per_account_max", 3)
    monkeypatch.setattr(parameters, "keys_kept_per_account_max", 2)

    async def work(pool: Pool) -> None:
        made = [await key(pool, number, PROVIDER) for number in range(1, 5)]
        assert [one.refusal for one in made] == ["", "", "", "invalid_request"]
        for number in range(5, 10):
            id = msgspec.json.decode(made[0].data)["id"]
            assert (await pool.command(f"cmd_r{number}", "revoke_key", key=id)).refusal == ""
            made[0] = await key(pool, number, PROVIDER, life_ms="60000")
            assert made[0].refusal == ""
        kept = await pool.store.transact(lambda tx: tx.keys.list(PROVIDER))
        assert len(kept) == 3 + 2
        await asyncio.sleep(61)
        assert (await key(pool, 10, PROVIDER)).refusal == ""

    in_pool(work)


def test_the_last_key_that_may_administer_for_ever_stays() -> None:
    async def work(pool: Pool) -> None:
        only = await pool.command("cmd_1", "revoke_key", key=FOUNDING.key)
        assert only.refusal == "forbidden"
        await key(pool, 2, admin="true", life_ms="60000")
        assert (await pool.command("cmd_3", "revoke_key", key=FOUNDING.key)).refusal == "forbidden"
        await key(pool, 4, admin="true")
        assert (await pool.command("cmd_5", "revoke_key", key=FOUNDING.key)).refusal == ""
        assert (await pool.command("cmd_6", "revoke_key", key=FOUNDING.key)).refusal == ""

    in_pool(work)


IMPLAUSIBLE = {
    "slots": {"slots": -1},
    "context": {"context_tokens": -(10**6)},
    "fetched": {"fetched_bytes": 2**60},
    "digest": {"digest": "d" * 1_000},
}


@pytest.mark.parametrize("case", IMPLAUSIBLE)
def test_a_heartbeat_that_cannot_be_true_is_dropped(case: str) -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        gateway.told.clear()
        false = beat()
        false.replicas[0] = msgspec.structs.replace(false.replicas[0], **IMPLAUSIBLE[case])
        node.tell("heartbeat", false)
        many = beat()
        many.replicas = many.replicas * (parameters.deployments_per_node_max + 1)
        node.tell("heartbeat", many)
        long = beat()
        long.replicas[0].detail = "x" * parameters.heartbeat_bytes_max
        node.tell("heartbeat", long)
        await asyncio.sleep(0.1)
        assert pool.coordinator.counters["malformed"] == 3
        assert gateway.heard("replicas", membership.replicas_decoder) == []

    in_pool(work)


def test_gateways_are_shown_no_more_than_was_deployed_and_notes_are_cut() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        for context, slots, shown in ((10**9, 10**6, (1024, 4, True)), (512, 2, (512, 2, True)),
                                      (0, 0, (0, 0, False))):  # fmt: skip
            gateway.told.clear()
            said = beat()
            said.replicas[0].context_tokens, said.replicas[0].slots = context, slots
            said.replicas[0].detail = "x" * 10_000
            node.tell("heartbeat", said)
            await asyncio.sleep(0.1)
            greet = Greet(public_key=gateway.signer.public_key, version="1")
            table = membership.replicas_decoder.decode(await gateway.ask("greet", greet))
            [replica] = table.changed
            assert (replica.context_tokens, replica.slots, replica.ready) == shown
        nodes = msgspec.json.decode((await pool.query("nodes")).data)["data"]
        assert nodes[0]["replicas"][0]["detail"] == "x" * parameters.note_letters_max

    in_pool(work)


def test_an_inventory_without_measure_is_refused() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        card = Accelerator(kind="k", name="n", memory_bytes=1)
        for changed in (
            {"hostname": "h" * 1_000},
            {"memory_bytes": -1},
            {"accelerators": [card] * (parameters.accelerators_max + 1)},
            {"accelerators": [msgspec.structs.replace(card, name="n" * 1_000)]},
        ):
            inventory = msgspec.structs.replace(INVENTORY, **changed)
            answer = await node.ask("hello", hello(node, inventory=inventory))
            assert membership.welcome_decoder.decode(answer).refusal == "malformed"

    in_pool(work)


def test_a_list_is_cut_to_what_an_answer_may_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pool: Pool) -> None:
        whole = msgspec.json.decode((await pool.query("nodes")).data)["data"]
        assert len(whole) == 4
        monkeypatch.setattr(parameters, "answer_bytes_max", 1_500)
        cut = msgspec.json.decode((await pool.query("nodes")).data)["data"]
        assert 0 < len(cut) < 4
        assert cut == whole[: len(cut)]
        monkeypatch.undo()

    in_pool(work, nodes=4)


def test_an_offset_far_ahead_is_refused_at_once_and_a_near_one_asked_for_a_few_times() -> None:
    async def work(pool: Pool) -> None:
        asked = 0
        transact = pool.store.transact

        async def counted(work):
            nonlocal asked
            asked += 1
            return await transact(work)

        pool.store.transact = counted  # type: ignore[method-assign]
        far = queries.Query(what="status", args={}, at_least_offset=10**15)
        answer = queries.answer_decoder.decode(await pool.gateway.ask("query", far))
        assert (answer.refusal, asked) == ("coordinator_unavailable", 1)
        near = queries.Query(what="status", args={}, at_least_offset=5_000)
        answer = queries.answer_decoder.decode(await pool.gateway.ask("query", near))
        assert answer.refusal == "coordinator_unavailable"
        assert asked < 20
        pool.store.transact = transact  # type: ignore[method-assign]

    in_pool(work)


def test_status_looks_at_no_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pool: Pool) -> None:
        await pool.hold()
        await asyncio.sleep(0.1)
        said = []
        pool.store.connection.set_trace_callback(said.append)  # type: ignore[attr-defined]
        status = msgspec.json.decode((await pool.query("status")).data)
        pool.store.connection.set_trace_callback(None)  # type: ignore[attr-defined]
        assert (status["books_balance"], status["holds_open"]) == (True, 1)
        assert not [one for one in said if "balances" in one or "sum(" in one]

    in_pool(work)


def test_a_gateway_that_is_gone_is_told_nothing_until_it_speaks() -> None:
    async def work(pool: Pool) -> None:
        gateway, gone = pool.gateway, Peer(pool.network, "gw", 9, pool.boots)
        await gone.listen()
        await gone.ask("greet", Greet(public_key=gone.signer.public_key, version="1"))
        for _ in range(11):
            await asyncio.sleep(61)
            gateway.tell("renew", money.HoldRenewal(hold="hold_none"))
            for node in pool.nodes:
                node.tell("heartbeat", beat())
        assert gone.heard("regreet", membership.regreet_decoder)
        gone.told.clear()
        gateway.told.clear()
        await key(pool, 1)
        await asyncio.sleep(11)
        assert gone.told == []
        assert gateway.heard("replicas", membership.replicas_decoder)
        await gone.ask("query", queries.Query(what="models", args={}))
        await asyncio.sleep(0.1)
        assert gone.heard("regreet", membership.regreet_decoder)

    in_pool(work)


def test_another_model_replaces_the_first_and_nodes_unload_it() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        other = msgspec.structs.replace(MANIFEST, name="other", digest="ef" * 32)
        founding = dataclasses.replace(FOUNDING, manifest=other)
        for _ in range(2):
            await pool.store.transact(lambda tx: bootstrap.ensure(tx, founding, 2, pool.boots))
        node.told.clear()
        gateway.told.clear()
        await asyncio.sleep(3)
        deploy = node.heard("deploy", membership.deploy_decoder)[-1]
        assert deploy.revision == 2
        assert [one.manifest.digest for one in deploy.deployments] == [other.digest]
        gone = gateway.heard("replicas", membership.replicas_decoder)[0]
        assert gone.removed == [(node.id, DIGEST)]
        models = msgspec.json.decode((await pool.query("models")).data)["data"]
        assert [one["id"] for one in models] == ["other"]
        # And back: the first is served again, under a revision of its own.
        await pool.store.transact(lambda tx: bootstrap.ensure(tx, FOUNDING, 3, pool.boots))
        await asyncio.sleep(3)
        deploy = node.heard("deploy", membership.deploy_decoder)[-1]
        assert (deploy.revision, [one.manifest.digest for one in deploy.deployments]) == (
            3,
            [DIGEST],
        )

    in_pool(work)


def test_a_machine_that_slept_voids_no_hold() -> None:
    async def work(pool: Pool) -> None:
        held = await pool.hold()
        await asyncio.sleep(15)
        pool.coordinator._state.clock._wall_skew_ms = 3_600_000  # type: ignore[attr-defined]
        await asyncio.sleep(120)
        row = await pool.store.transact(lambda tx: tx.holds.get(held.hold))
        assert row is not None
        assert row.hold.state == "open"
        await asyncio.sleep(600 + 900 - 120 - 60)
        assert await pool.available_micro() == START - 1_000_000
        await asyncio.sleep(120)
        assert await pool.available_micro() == START

    in_pool(work)


def test_old_commands_are_forgotten() -> None:
    async def work(pool: Pool) -> None:
        await pool.command("cmd_1", "deposit", account=OWNER, amount_micro="5")
        await asyncio.sleep(86_300)
        assert await pool.store.transact(lambda tx: tx.commands.get("cmd_1"))
        await asyncio.sleep(300)
        assert await pool.store.transact(lambda tx: tx.commands.get("cmd_1")) is None

    in_pool(work, nodes=0)


class Wire:
    """The coordinator's bus, whose connection can be cut."""

    def __init__(self, pool: Pool) -> None:
        self.connected = True
        self._inner = pool.bus
        pool.coordinator._mail._bus = self  # type: ignore[assignment]

    def publish(self, subject: str, payload: bytes) -> None:
        self._inner.publish(subject, payload)


def test_what_is_told_without_a_connection_stays_in_the_outbox() -> None:
    async def work(pool: Pool) -> None:
        node, wire = pool.nodes[0], Wire(pool)
        held = await pool.hold()
        wire.connected = False
        node.tell("receipts", batch(node, pool.receipt(held, node)))
        await asyncio.sleep(3)
        assert len(await pool.store.transact(lambda tx: tx.outbox.pending(9))) == 2
        wire.connected = True
        await asyncio.sleep(3)
        assert await pool.store.transact(lambda tx: tx.outbox.pending(9)) == []
        [ack] = node.heard("receipts_ack", money.receipts_ack_decoder)
        assert ack.accepted == ["rcp_1_1"]

    in_pool(work)


def test_what_a_lost_connection_took_is_told_again() -> None:
    async def work(pool: Pool) -> None:
        node, wire = pool.nodes[0], Wire(pool)
        held = await pool.hold()
        pool.network.fate = lambda sender, _subject: (0,) if sender == node.id else ()
        node.tell("receipts", batch(node, pool.receipt(held, node)))
        await asyncio.sleep(0.01)
        wire.connected = False
        await asyncio.sleep(3)
        assert len(await pool.store.transact(lambda tx: tx.outbox.pending(9))) == 2
        pool.network.fate = perfect
        wire.connected = True
        await asyncio.sleep(3)
        [ack] = node.heard("receipts_ack", money.receipts_ack_decoder)
        assert ack.accepted == ["rcp_1_1"]

    in_pool(work)


def test_a_receipt_that_breaks_a_rule_of_the_database_is_counted_and_its_neighbour_paid(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        held = await pool.hold()
        false = pool.receipt(held, node, "req_a", prompt=2**62)
        with caplog.at_level(logging.CRITICAL):
            node.tell("receipts", batch(node, false, pool.receipt(held, node, "req_b")))
            await asyncio.sleep(0.1)
        assert await pool.posted_micro(PROVIDER) >= 32

    in_pool(work)
