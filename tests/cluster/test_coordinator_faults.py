"""Crashes, restarts, silence, and the desks for nodes, keys and questions."""

import asyncio
import hashlib
import random

import msgspec
import pytest

from potluck.adapters.sql import InlineStore
from potluck.core.ids import AccountId
from potluck.messages import envelope, membership, money, queries, views
from potluck.ports.bus import Delivery
from potluck.simulator.network import perfect
from tests.cluster.coordinator_under_test import (
    DIGEST,
    OWNER,
    PROVIDER,
    Pool,
    batch,
    beat,
    hello,
    in_pool,
)

START = 10_000_000


def disk_of(pool: Pool) -> InlineStore:
    assert isinstance(pool.store, InlineStore)
    return InlineStore(pool.store.connection)


def test_it_dies_between_record_and_tell() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        held = await pool.hold()
        pool.coordinator._mail.send = lambda _subject, _body: False  # type: ignore[method-assign]
        node.tell("receipts", batch(node, pool.receipt(held, node)))
        await asyncio.sleep(0.1)
        assert await pool.posted_micro(PROVIDER) == 32
        assert node.heard("receipts_ack", money.receipts_ack_decoder) == []
        await pool.kill()
        await pool.start(disk_of(pool))
        await asyncio.sleep(0.1)
        [ack] = node.heard("receipts_ack", money.receipts_ack_decoder)
        assert ack.accepted == ["rcp_1_1"]
        assert len(pool.gateway.heard("settled", money.settled_decoder)) == 1
        node.tell("receipts", batch(node, pool.receipt(held, node)))
        await asyncio.sleep(3)
        assert len(node.heard("receipts_ack", money.receipts_ack_decoder)) == 2
        assert await pool.posted_micro(PROVIDER) == 32
        assert await pool.store.transact(lambda tx: tx.outbox.pending(10)) == []

    in_pool(work)


def test_restarted_it_asks_who_is_there_and_buries_nobody_early() -> None:
    async def work(pool: Pool) -> None:
        await asyncio.sleep(4)
        await pool.kill()
        await asyncio.sleep(60)
        for peer in (pool.gateway, *pool.nodes):
            peer.told.clear()
        await pool.start(disk_of(pool))
        await asyncio.sleep(0.1)
        assert len(pool.gateway.heard("regreet", membership.regreet_decoder)) == 1
        assert all(node.heard("rehello", membership.rehello_decoder) for node in pool.nodes)
        await asyncio.sleep(10)
        assert await liveness(pool) == ["alive"] * 3
        pool.nodes[0].tell("heartbeat", beat())
        pool.nodes[1].tell("heartbeat", beat())
        await asyncio.sleep(11)
        assert await liveness(pool) == ["alive", "alive", "dead"]

    in_pool(work, nodes=3)


async def liveness(pool: Pool) -> list[str]:
    answer = await pool.query("nodes")
    nodes = {one["id"]: one["liveness"] for one in msgspec.json.decode(answer.data)["data"]}
    return [nodes[node.id] for node in pool.nodes]


def test_mass_silence_freezes_and_one_that_closed_dies_all_the_same() -> None:
    async def work(pool: Pool) -> None:
        await asyncio.sleep(60)
        assert await liveness(pool) == ["suspect"] * 4
        assert b'"evictions_frozen":true' in (await pool.query("status")).data
        for node in pool.nodes:
            node.tell("heartbeat", beat())
        await asyncio.sleep(2)
        assert await liveness(pool) == ["alive"] * 4
        pool.nodes[0].bus.drop()
        await asyncio.sleep(5)
        assert await liveness(pool) == ["dead", "alive", "alive", "alive"]

    in_pool(work, nodes=4)


def test_our_own_stall_kills_nobody() -> None:
    async def work(pool: Pool) -> None:
        for node in pool.nodes:
            node.tell("heartbeat", beat())
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        loop.now_s += 60  # type: ignore[attr-defined]
        await asyncio.sleep(2)
        assert await liveness(pool) == ["alive", "alive"]
        feed = await pool.store.transact(lambda tx: tx.events.after(0, 1000))
        assert not [one for one in feed if one.kind in ("node_dead", "node_suspect")]

    in_pool(work, nodes=2)


def test_an_unknown_node_is_asked_for_hello_and_a_false_key_is_refused() -> None:
    async def work(pool: Pool) -> None:
        known, stranger = pool.nodes[0], pool.nodes[1]
        del pool.coordinator._state.roster.members[stranger.id]  # type: ignore[arg-type]
        stranger.told.clear()
        stranger.tell("heartbeat", beat())
        await asyncio.sleep(0.1)
        assert len(stranger.heard("rehello", membership.rehello_decoder)) == 1
        false = hello(stranger, public_key=known.signer.public_key)
        welcome = membership.welcome_decoder.decode(await stranger.ask("hello", false))
        assert welcome.refusal == "forged"
        nobody = hello(stranger, account=AccountId("acc_nobody"))
        welcome = membership.welcome_decoder.decode(await stranger.ask("hello", nobody))
        assert welcome.refusal == "account_not_found"

    in_pool(work, nodes=2)


def test_a_node_that_differs_is_told_again_until_it_does_not() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        node.told.clear()
        node.tell("heartbeat", beat(replicas=False))
        await asyncio.sleep(6.5)
        said = node.heard("deploy", membership.deploy_decoder)
        assert len(said) >= 3
        assert [one.manifest.digest for one in said[-1].deployments] == [DIGEST]
        node.tell("heartbeat", beat("fetching", revision=said[-1].revision))
        await asyncio.sleep(1)
        node.told.clear()
        await asyncio.sleep(4)
        assert node.heard("deploy", membership.deploy_decoder) == []

    in_pool(work)


def test_a_node_that_started_anew_serves_nothing_until_it_says_so() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        gateway.told.clear()
        await node.ask("hello", hello(node))
        assert gateway.heard("replicas", membership.replicas_decoder) == []
        node.restart(pool.boots)
        await node.ask("hello", hello(node))
        await asyncio.sleep(0.1)
        [delta] = gateway.heard("replicas", membership.replicas_decoder)
        assert delta.removed == [(node.id, DIGEST)]

    in_pool(work)


def test_gateways_follow_the_replica_table_by_offset() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        gateway.told.clear()
        node.tell("heartbeat", beat("loading"))
        await asyncio.sleep(0.1)
        [delta] = gateway.heard("replicas", membership.replicas_decoder)
        assert delta.offset == delta.follows + 1
        assert [one.ready for one in delta.changed] == [False]
        gateway.told.clear()
        await asyncio.sleep(5.5)
        empty = gateway.heard("replicas", membership.replicas_decoder)[-1]
        assert (empty.offset, empty.follows, empty.changed) == (delta.offset, delta.offset, [])
        greet = membership.Greet(public_key=gateway.signer.public_key, version="1")
        whole = membership.replicas_decoder.decode(await gateway.ask("greet", greet))
        assert (whole.whole, whole.offset, len(whole.changed)) == (True, delta.offset, 1)
        node.tell("bye", membership.Bye(reason="stop"))
        await asyncio.sleep(0.1)
        gone = gateway.heard("replicas", membership.replicas_decoder)[-1]
        assert gone.removed == [(node.id, DIGEST)]

    in_pool(work)


def test_commands_are_done_once_and_no_key_is_ever_seen() -> None:
    async def work(pool: Pool) -> None:
        made = await pool.command("cmd_1", "create_account", name="alice")
        again = await pool.command("cmd_1", "create_account", name="alice")
        assert (made.refusal, made.data, made.offset) == ("", again.data, again.offset)
        other = await pool.command("cmd_1", "create_account", name="bob")
        assert other.refusal == "id_reused"
        alice = msgspec.json.decode(made.data)
        assert alice["available_micro"] == START
        rich = await pool.command("cmd_p", "create_account", name="farm", kind="provider")
        assert msgspec.json.decode(rich.data)["available_micro"] == 0
        mint = await pool.command("cmd_m", "create_account", name="m", kind="mint")
        assert mint.refusal == "invalid_request"
        digest = hashlib.sha256(b"pk_drawn_by_the_gateway").hexdigest()
        words = {"account": alice["id"], "name": "laptop", "hash": digest, "life_ms": "60000"}
        shown = await pool.command("cmd_2", "create_key", **words)
        view = msgspec.json.decode(shown.data, type=views.KeyView)
        assert (view.name, view.admin) == ("laptop", False)
        assert view.expires_ms == view.created_ms + 60_000
        found = await pool.query("key", hash=digest)
        record = queries.key_record_decoder.decode(found.data)
        assert (record.account, record.admin) == (alice["id"], False)
        repeat = await pool.command("cmd_2", "create_key", **words)
        assert (repeat.data, repeat.offset) == (shown.data, shown.offset)
        for false in ({"hash": "no"}, {"hash": digest}, {"life_ms": "0"}, {"life_ms": "x"}):
            answer = await pool.command(f"cmd_{false}", "create_key", **{**words, **false})
            assert answer.refusal == "invalid_request"
        await pool.command("cmd_3", "revoke_key", key=record.id)
        await asyncio.sleep(0.1)
        assert (await pool.query("key", hash=digest)).refusal == "revoked_key"
        [notice] = pool.gateway.heard("notice", membership.notice_decoder)
        assert (notice.kind, notice.name) == ("key", digest)
        await pool.command("cmd_4", "deposit", account=alice["id"], amount_micro="5")
        await pool.command("cmd_4", "deposit", account=alice["id"], amount_micro="5")
        assert await pool.available_micro(alice["id"]) == START + 5
        for bad in ("-5", "0", "x", "1" * 40, ""):
            answer = await pool.command("cmd_" + bad, "deposit", account=OWNER, amount_micro=bad)
            assert answer.refusal == "invalid_request"

    in_pool(work)


def test_every_question_is_answered_and_a_future_offset_is_waited_for() -> None:
    async def work(pool: Pool) -> None:
        node = pool.nodes[0]
        node.tell("receipts", batch(node, pool.receipt(await pool.hold(), node)))
        await asyncio.sleep(0.1)
        for what in (
            "nodes",
            "models",
            "accounts",
            "keys",
            "receipts",
            "ledger",
            "holds",
            "events",
        ):
            page = msgspec.json.decode((await pool.query(what)).data)
            assert page["object"] == "list"
            assert page["data"], what
        assert b'"books_balance":true' in (await pool.query("status")).data
        receipt = msgspec.json.decode((await pool.query("receipt", receipt="rcp_1_1")).data)
        assert (receipt["provider_micro"], receipt["fee_micro"], receipt["total_micro"]) == (
            32,
            3,
            35,
        )
        caused = msgspec.json.decode((await pool.query("ledger", cause="rcp_1_1")).data)["data"]
        assert [(one["kind"], one["amount_micro"]) for one in caused] == [("fee", 3), ("usage", 32)]
        assert (await pool.query("receipt", receipt="rcp_none")).refusal == "receipt_not_found"
        assert (await pool.query("account", account="acc_none")).refusal == "account_not_found"
        late = queries.Query(what="status", args={}, at_least_offset=10_000)
        answer = queries.answer_decoder.decode(await pool.gateway.ask("query", late))
        assert answer.refusal == "coordinator_unavailable"

    in_pool(work)


def test_a_full_disk_is_said_and_serving_goes_on_when_there_is_room() -> None:
    async def work(pool: Pool) -> None:
        connection = disk_of(pool).connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        refusals = {(await pool.hold(1_000)).refusal for _ in range(40)}
        assert "store_full" in refusals
        connection.execute("PRAGMA max_page_count = 1000000")
        assert (await pool.hold(1_000)).refusal == ""

    in_pool(work)


@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_repeats_and_reorders_changes_no_amount(seed: int) -> None:
    rng = random.Random(seed)

    def fate(_sender: str, _subject: str) -> list[int]:
        return [rng.randrange(80) for _ in range(rng.choice((1, 1, 2, 3)))]

    async def work(pool: Pool) -> None:
        pool.network.fate = fate
        holds = await asyncio.gather(*(pool.hold() for _ in range(4)))
        assert [one.refusal for one in holds] == [""] * 4
        said = []
        for number, held in enumerate(holds):
            node = pool.nodes[number % 2]
            said += [
                (node, batch(node, pool.receipt(held, node, f"req_{number}n{leaf}")))
                for leaf in range(6)
            ]
        for _ in range(3):
            rng.shuffle(said)
            for node, one in said:
                node.tell("receipts", one)
            await asyncio.sleep(0.2)
        await asyncio.sleep(3)
        assert await pool.posted_micro(PROVIDER) == 24 * 32
        told = [
            (item.request, item.total_micro)
            for settled in pool.gateway.heard("settled", money.settled_decoder)
            for item in settled.items
        ]
        assert set(told) == {(f"req_{n}n{leaf}", 35) for n in range(4) for leaf in range(6)}
        pool.network.fate = perfect

    in_pool(work, nodes=2)


def test_an_answer_goes_to_the_asker_and_to_nobody_else() -> None:
    async def work(pool: Pool) -> None:
        node, gateway = pool.nodes[0], pool.gateway
        payload = node.stamp.seal(envelope.encode(hello(node)))
        subject = f"potluck.v1.home.{node.id}.hello._"
        pool.network.route(node.id, Delivery(subject, payload, f"_INBOX.{gateway.id}.1"))
        await asyncio.sleep(0.1)
        assert pool.coordinator.counters["foreign_inbox"] == 1

    in_pool(work)
