"""One suite for both stores: in line, and with the writer thread on a file."""

import asyncio
import dataclasses
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from potluck.adapters.sql import (
    InlineStore,
    connections,
    migrate,
    open_store,
    receipts,
    schema,
    transfers,
)
from potluck.core.holds import Hold
from potluck.core.ids import (
    AccountId,
    BootId,
    Digest,
    GatewayId,
    HoldId,
    KeyId,
    NodeId,
    ReceiptId,
    RequestId,
    TransferId,
)
from potluck.core.ledger import Balance
from potluck.ports.store import (
    AccountRow,
    CountersignatureRow,
    DeploymentRow,
    EventRow,
    GatewayRow,
    HoldRow,
    KeyRow,
    NodeRow,
    ReceiptRow,
    SchemaTooNewError,
    Store,
    StoreFullError,
    StoreUnavailableError,
    TransferRow,
    Tx,
)

ALICE = AccountRow(id=AccountId("acc_a"), name="alice", kind="person", created_ms=1)
KEY = KeyRow(
    id=KeyId("key_1"), account=ALICE.id, name="k", hash="a" * 64, admin=True, created_ms=1,
    expires_ms=None, revoked_ms=None,
)  # fmt: skip
HOLD = HoldRow(
    hold=Hold(
        id=HoldId("hold_1"), account=ALICE.id, gateway=GatewayId("gw_1"), boot=BootId("B"),
        amount_micro=100, settled_micro=10, expires_ms=50,
    ),
    want_micro=200, grant_key=b"k", opened_ms=3,
)  # fmt: skip
RECEIPT = ReceiptRow(
    id=ReceiptId("rcp_1_1"), request=RequestId("req_1"), attempt=1, account=ALICE.id,
    node=NodeId("node_1"), gateway=GatewayId("gw_1"), hold=HoldId("hold_1"), body=b"b",
    root=b"r", signature=b"s", path=b"p", public_key=b"k", provider_micro=32, fee_micro=3,
    refusal="", at_ms=9,
)  # fmt: skip
NODE = NodeRow(
    id=NodeId("node_1"), name="n", account=ALICE.id, public_key=b"k", version="1", tier="full",
    tier_reason="", inventory=b"i", report=b"", liveness="alive", heard_ms=5, closed_ms=None,
    joined_ms=4,
)  # fmt: skip
DEPLOYMENT = DeploymentRow(
    model="m", digest=Digest("d"), manifest=b"m", slots=4, input_micro_per_mtok=1,
    output_micro_per_mtok=2, fee_basis_points=3, revision=1,
)  # fmt: skip


def transfer(
    number: int, at_ms: int = 0, payer: str = "acc_a", payee: str = "acc_b"
) -> TransferRow:
    return TransferRow(
        id=TransferId(f"tr_{number:04d}"), kind="deposit", payer=AccountId(payer),
        payee=AccountId(payee), amount_micro=number + 1, cause=f"c{number % 2}", hold=None,
        at_ms=at_ms,
    )  # fmt: skip


@asynccontextmanager
async def inline(folder: Path) -> AsyncIterator[Store]:
    store = InlineStore(folder / "potluck.db")
    yield store
    await store.close()
    store.connection.close()


@asynccontextmanager
async def threaded(folder: Path) -> AsyncIterator[Store]:
    store = await open_store(folder / "potluck.db")
    yield store
    await store.close()


KINDS = {"inline": inline, "threaded": threaded}


@pytest.fixture(params=KINDS)
def with_store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[Callable[[Store], Awaitable[None]]], None]:
    """Runs work on a store that opens the same file each time."""

    def run(work: Callable[[Store], Awaitable[None]]) -> None:
        async def opened() -> None:
            async with KINDS[request.param](tmp_path) as store:
                await work(store)

        asyncio.run(opened())

    return run


With = Callable[[Callable[[Store], Awaitable[None]]], None]


def test_every_table_gives_back_what_it_was_given(with_store: With) -> None:
    countersignature = CountersignatureRow(
        request=RequestId("req_1"), attempt=1, gateway=GatewayId("gw_1"), delivered_tokens=8,
        total_micro=35, body=b"b", root=b"r", signature=b"s", path=b"p", public_key=b"k", at_ms=1,
    )  # fmt: skip
    gateway = GatewayRow(id=GatewayId("gw_1"), public_key=b"k", boot=BootId("B"), seen_ms=1)

    def write(tx: Tx) -> None:
        tx.accounts.insert(ALICE)
        tx.keys.insert(KEY)
        tx.holds.insert(HOLD)
        tx.receipts.insert(RECEIPT)
        assert tx.countersignatures.insert(countersignature)
        assert not tx.countersignatures.insert(dataclasses.replace(countersignature, total_micro=1))
        tx.nodes.put(NODE)
        tx.gateways.put(gateway)
        tx.deployments.put(DEPLOYMENT)
        tx.commands.insert("cmd_1", b"h" * 32, b"answer", 1)

    def read(tx: Tx) -> None:
        assert tx.accounts.get(ALICE.id) == tx.accounts.by_name("alice") == ALICE
        assert tx.accounts.list() == [ALICE]
        assert tx.keys.by_hash("a" * 64) == tx.keys.get(KEY.id) == KEY
        assert tx.keys.list() == tx.keys.list(ALICE.id) == [KEY]
        assert tx.holds.get(HOLD.hold.id) == HOLD
        assert tx.holds.open_of(ALICE.id) == tx.holds.open_until(50, 10) == [HOLD]
        assert tx.holds.open_until(49, 10) == []
        assert (tx.holds.pending_sums(), tx.holds.count_open()) == ([(ALICE.id, 90)], 1)
        assert tx.receipts.get(RECEIPT.id) == RECEIPT
        assert tx.receipts.of_request(RECEIPT.request) == tx.receipts.list(ALICE.id) == [RECEIPT]
        assert (tx.receipts.list(), tx.receipts.count()) == ([RECEIPT], 1)
        said = tx.countersignatures.get(RequestId("req_1"), 1, GatewayId("gw_1"))
        assert said == countersignature
        assert tx.countersignatures.get(RequestId("req_1"), 1, GatewayId("gw_2")) is None
        assert tx.nodes.get(NODE.id) == NODE
        assert tx.gateways.list() == [gateway]
        assert tx.deployments.list() == [DEPLOYMENT]
        assert tx.commands.get("cmd_1") == (b"h" * 32, b"answer")
        for missing in (
            tx.accounts.get(AccountId("x")), tx.keys.get(KeyId("x")), tx.holds.get(HoldId("x")),
            tx.receipts.get(ReceiptId("x")), tx.nodes.get(NodeId("x")), tx.commands.get("x"),
            tx.gateways.get(GatewayId("x")), tx.deployments.get(Digest("x")),
        ):  # fmt: skip
            assert missing is None

    def change(tx: Tx) -> None:
        tx.keys.revoke(KEY.id, 7)
        tx.keys.revoke(KEY.id, 8)
        tx.holds.update(dataclasses.replace(HOLD.hold, settled_micro=20, state="voided"))
        tx.receipts.correct(RECEIPT.id, 20, 2)
        tx.nodes.put(dataclasses.replace(NODE, liveness="dead", closed_ms=9))

    def changed(tx: Tx) -> None:
        assert tx.keys.get(KEY.id) == dataclasses.replace(KEY, revoked_ms=7)
        assert (tx.holds.open_of(ALICE.id), tx.holds.pending_sums()) == ([], [])
        assert [(one.provider_micro, one.fee_micro) for one in tx.receipts.list()] == [(20, 2)]
        assert tx.nodes.list() == [dataclasses.replace(NODE, liveness="dead", closed_ms=9)]

    async def work(store: Store) -> None:
        for step in (write, read, change, changed):
            await store.transact(step)

    with_store(work)


def test_transfers_are_seen_by_the_item_that_wrote_them_and_newest_first(with_store: With) -> None:
    def write(tx: Tx) -> None:
        tx.transfers.insert(transfer(0, at_ms=5))
        assert tx.transfers.get(TransferId("tr_0000")) == transfer(0, at_ms=5)
        tx.transfers.insert(transfer(1, at_ms=6, payer="acc_b", payee="acc_a"))
        tx.transfers.insert(transfer(2, at_ms=7, payer="acc_b", payee="acc_c"))

    def read(tx: Tx) -> None:
        assert [one.at_ms for one in tx.transfers.list()] == [7, 6, 5]
        assert [one.at_ms for one in tx.transfers.list(AccountId("acc_a"))] == [6, 5]
        assert [one.at_ms for one in tx.transfers.list(limit=1, before_ms=7)] == [6]
        assert tx.transfers.get(TransferId("tr_0002")) == transfer(
            2, at_ms=7, payer="acc_b", payee="acc_c"
        )
        assert dict(tx.transfers.sums()) == {"acc_a": 1, "acc_b": -4, "acc_c": 3}

    async def work(store: Store) -> None:
        await store.transact(write)
        await store.transact(read)

    with_store(work)


def test_pages_and_counts_end_at_their_limit_and_sort_nothing(with_store: With) -> None:
    def write(tx: Tx) -> None:
        for number in range(40):
            tx.transfers.insert(transfer(number, at_ms=number // 4, payee="acc_a"))
            tx.receipts.insert(
                dataclasses.replace(
                    RECEIPT, id=ReceiptId(f"rcp_{number}"), at_ms=number // 4,
                    refusal="forged" if number % 2 else "",
                    provider_micro=0 if number % 2 else 32, fee_micro=0 if number % 2 else 3,
                )
            )  # fmt: skip

    def read(tx: Tx) -> None:
        everything = [one.id for one in reversed(tx.transfers.list())]
        assert everything == [f"tr_{number:04d}" for number in range(40)]
        assert [one.id for one in tx.transfers.list(AccountId("acc_a"))] == everything[::-1]
        for before_ms in (0, 1, 5, 9, 10, 99):
            page = [one.id for one in tx.transfers.list(limit=3, before_ms=before_ms)]
            assert page == everything[: 4 * min(before_ms, 10)][::-1][:3]
        assert tx.receipts.count() == 40
        assert tx.receipts.refused_of(NodeId("node_1")) == 20
        assert tx.receipts.settled_sums() == [(HoldId("hold_1"), 20 * 35)]

    async def work(store: Store) -> None:
        await store.transact(write)
        await store.transact(read)
        connection = getattr(store, "connection", None) or store._connection  # type: ignore[attr-defined]
        for statement, values in (
            (transfers._LIST_OF, ("acc_a", 5, 9, "acc_a", 5, 9, 9)),
            (receipts._LIST_OF, ("acc_a", 9)),
            (receipts._LIST, (9,)),
            (receipts._REFUSED_OF, ("node_1",)),
        ):
            plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + statement, values)]
            # Only the two parts of a page, each cut to its limit, may be sorted into one.
            sorts = sum("TEMP B-TREE" in line for line in plan)
            assert sorts <= (statement is transfers._LIST_OF), plan
            scanned = any(re.search(r"SCAN (transfers|receipts)$", line) for line in plan)
            # By row, from the end, until the page is full.
            assert scanned == (statement is receipts._LIST), plan

    with_store(work)


def test_keys_are_counted_and_the_oldest_dead_forgotten(with_store: With) -> None:
    def work(tx: Tx) -> None:
        tx.accounts.insert(ALICE)
        for number in range(6):
            revoked_ms, expires_ms = (5, None) if number < 3 else (None, 50 + number)
            key = dataclasses.replace(
                KEY, id=KeyId(f"key_{number}"), hash=f"{number:064x}", created_ms=number,
                expires_ms=expires_ms, revoked_ms=revoked_ms,
            )  # fmt: skip
            tx.keys.insert(key)
        assert tx.keys.live_of(ALICE.id, 54) == 1
        assert tx.keys.lasting_admins() == 0
        tx.keys.forget_dead_of(ALICE.id, 54, keep=2)
        assert [row.id for row in tx.keys.list()] == ["key_5", "key_4", "key_3"]
        assert [row.id for row in tx.keys.list(ALICE.id, 1)] == ["key_5"]

    async def run(store: Store) -> None:
        await store.transact(work)

    with_store(run)


def test_holds_are_postponed_and_old_commands_pruned(with_store: With) -> None:
    def work(tx: Tx) -> None:
        tx.accounts.insert(ALICE)
        tx.holds.insert(HOLD)
        tx.holds.postpone(7)
        assert [row.hold.expires_ms for row in tx.holds.list_open(9)] == [57]
        assert [one.settled_micro for one in tx.holds.settled()] == [10]
        assert [tx.holds.count_open(limit) for limit in (0, 1, 9)] == [0, 1, 1]
        for number in range(5):
            tx.commands.insert(f"cmd_{number}", b"h", b"a", number)
        tx.commands.prune(4, 2)
        tx.commands.prune(4, 1)
        left = [number for number in range(5) if tx.commands.get(f"cmd_{number}")]
        assert left == [3, 4]

    async def run(store: Store) -> None:
        await store.transact(work)

    with_store(run)


def test_a_number_too_large_for_sql_fails_its_item_and_no_other(with_store: With) -> None:
    def item(number: int) -> Callable[[Tx], int]:
        def work(tx: Tx) -> int:
            before = tx.balances.get(ALICE.id)
            more = 2**63 if number == 3 else 1
            tx.balances.put(ALICE.id, Balance(posted_micro=before.posted_micro + more))
            return number

        return work

    async def work(store: Store) -> None:
        results = await asyncio.gather(
            *(store.transact(item(number)) for number in range(6)), return_exceptions=True
        )
        assert isinstance(results[3], OverflowError)
        assert [one for one in results if isinstance(one, int)] == [0, 1, 2, 4, 5]
        posted = await store.transact(lambda tx: tx.balances.get(ALICE.id).posted_micro)
        assert posted == 5

    with_store(work)


def test_a_database_beyond_repair_fails_all_who_wait_and_tells_its_owner(tmp_path: Path) -> None:
    async def run() -> None:
        told: list[bool] = []
        store = await open_store(tmp_path / "potluck.db", lambda: told.append(True))

        def fatal(_tx: Tx) -> None:
            store._connection.close()
            raise RuntimeError("not even rolled back")

        results = await asyncio.gather(
            *(store.transact(work) for work in (fatal, lambda tx: tx.events.last_offset())),
            return_exceptions=True,
        )
        assert [type(one) for one in results] == [StoreUnavailableError] * 2
        with pytest.raises(StoreUnavailableError):
            await store.transact(lambda tx: tx.events.last_offset())
        assert told == [True]
        await store.close()

    asyncio.run(run())


def test_one_item_of_a_group_fails_alone(with_store: With) -> None:
    """Also what it had already written, or made SQL write for others, and what its cache held."""

    def item(number: int) -> Callable[[Tx], int]:
        def work(tx: Tx) -> int:
            before = tx.balances.get(ALICE.id)
            tx.balances.put(ALICE.id, Balance(posted_micro=before.posted_micro + 1))
            tx.transfers.insert(transfer(number))
            tx.events.append(number, "k", "s", "{}")
            tx.outbox.add("subject", b"body")
            if number % 3 == 1:
                assert len(tx.transfers.list()) > 0
                assert dict(tx.balances.list())[ALICE.id].posted_micro > 0
            if number % 3 != 2:
                raise RuntimeError(str(number))
            return number

        return work

    async def work(store: Store) -> None:
        results = await asyncio.gather(
            *(store.transact(item(number)) for number in range(60)), return_exceptions=True
        )
        good = [one for one in results if isinstance(one, int)]
        assert good == list(range(2, 60, 3))
        assert sum(isinstance(one, RuntimeError) for one in results) == 40

        def read(tx: Tx) -> None:
            assert tx.balances.get(ALICE.id).posted_micro == 20
            assert [one.id for one in reversed(tx.transfers.list())] == [
                f"tr_{number:04d}" for number in good
            ]
            assert [one.offset for one in tx.events.after(0, 100)] == list(range(1, 21))
            assert len(tx.outbox.pending(100)) == 20

        await store.transact(read)

    with_store(work)


def test_a_broken_constraint_fails_its_item_and_no_other(with_store: With) -> None:
    def item(number: int) -> Callable[[Tx], None]:
        def work(tx: Tx) -> None:
            before = tx.balances.get(ALICE.id)
            tx.balances.put(ALICE.id, Balance(posted_micro=before.posted_micro + 1))
            tx.transfers.insert(transfer(min(number, 5)))

        return work

    async def work(store: Store) -> None:
        results = await asyncio.gather(
            *(store.transact(item(number)) for number in range(9)), return_exceptions=True
        )
        assert [type(one) for one in results[6:]] == [sqlite3.IntegrityError] * 3
        assert results[:6] == [None] * 6
        posted = await store.transact(lambda tx: tx.balances.get(ALICE.id).posted_micro)
        assert posted == 6

    with_store(work)


def test_the_feed_has_no_gaps_and_the_outbox_empties(with_store: With) -> None:
    async def work(store: Store) -> None:
        offsets = await asyncio.gather(
            *(store.transact(lambda tx: tx.events.append(1, "k", "s", "{}")) for _ in range(50))
        )
        assert sorted(offsets) == list(range(1, 51))
        page = await store.transact(lambda tx: tx.events.after(10, 2))
        assert page == [
            EventRow(offset=offset, at_ms=1, kind="k", subject="s", data="{}")
            for offset in (11, 12)
        ]
        assert await store.transact(lambda tx: tx.events.last_offset()) == 50
        await store.transact(lambda tx: [tx.outbox.add(f"s{n}", b"b") for n in range(5)])
        rows = await store.transact(lambda tx: tx.outbox.pending(3))
        assert [row.subject for row in rows] == ["s0", "s1", "s2"]
        await store.transact(lambda tx: tx.outbox.remove([row.id for row in rows]))
        left = await store.transact(lambda tx: tx.outbox.pending(9))
        assert [row.subject for row in left] == ["s3", "s4"]

    with_store(work)


def test_a_full_disk_keeps_nothing_of_the_group_and_the_store_goes_on(with_store: With) -> None:
    async def work(store: Store) -> None:
        connection = getattr(store, "connection", None) or store._connection  # type: ignore[attr-defined]
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 20}")
        results = await asyncio.gather(
            *(store.transact(_fill(number)) for number in range(100)), return_exceptions=True
        )
        failed = [one for one in results if isinstance(one, BaseException)]
        assert failed
        assert {type(one) for one in failed} == {StoreFullError}
        connection.execute("PRAGMA max_page_count = 1000000")
        kept = await store.transact(lambda tx: tx.events.last_offset())
        assert kept == 100 - len(failed)
        posted = await store.transact(lambda tx: tx.balances.get(ALICE.id).posted_micro)
        assert posted == kept

    with_store(work)


def _fill(number: int) -> Callable[[Tx], None]:
    def work(tx: Tx) -> None:
        before = tx.balances.get(ALICE.id)
        tx.balances.put(ALICE.id, Balance(posted_micro=before.posted_micro + 1))
        tx.events.append(number, "k", "s", "x" * 5_000)

    return work


def test_closed_it_refuses_and_reopened_it_remembers(with_store: With) -> None:
    kept: list[Store] = []

    async def write(store: Store) -> None:
        kept.append(store)
        await store.transact(lambda tx: tx.events.append(1, "k", "s", "{}"))

    async def read(store: Store) -> None:
        assert await store.transact(lambda tx: tx.events.last_offset()) == 1
        with pytest.raises(StoreUnavailableError):
            await kept[0].transact(lambda tx: tx.events.last_offset())

    with_store(write)
    with_store(read)


def test_a_newer_schema_is_refused_and_not_touched(with_store: With, tmp_path: Path) -> None:
    async def nothing(_store: Store) -> None: ...

    with_store(nothing)
    connection = sqlite3.connect(tmp_path / "potluck.db")
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    with pytest.raises(SchemaTooNewError):
        with_store(nothing)
    assert migrate.current(connection) == "9999"
    connection.close()


def test_no_folder_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError):
        asyncio.run(open_store(tmp_path / "none" / "potluck.db"))


def test_a_restarted_coordinator_finds_the_inline_disk() -> None:
    async def run() -> None:
        first = InlineStore()
        await first.transact(lambda tx: tx.events.append(1, "k", "s", "{}"))
        await first.close()
        second = InlineStore(first.connection)
        assert await second.transact(lambda tx: tx.events.last_offset()) == 1
        second.connection.close()

    asyncio.run(run())


# Migrations


def test_alembic_finds_no_difference_and_both_ways_lead_to_the_same_schema() -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from sqlalchemy import StaticPool, create_engine

    upgraded = connections.connect(":memory:")
    migrate.upgrade(upgraded)
    created = connections.connect(":memory:")
    migrate.bring_up_to_date(created)
    engine = create_engine("sqlite://", creator=lambda: upgraded, poolclass=StaticPool)
    with engine.connect() as wrapped:
        context = MigrationContext.configure(wrapped, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    assert _shape(upgraded) == _shape(created)
    assert migrate.current(upgraded) == migrate.current(created) == migrate.HEAD
    scripts = ScriptDirectory.from_config(migrate.configuration())
    assert [one.revision for one in scripts.walk_revisions()][::-1] == list(migrate.REVISIONS)
    upgraded.close()
    created.close()


def _shape(connection: sqlite3.Connection) -> list[tuple[str, list[str]]]:
    """The words of each definition; in which order constraints stand does not matter."""
    found = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    )
    return [(name, sorted(re.findall(r"\w+|'[^']*'", sql))) for name, sql in found]


# Crashes

_VICTIM = """
import asyncio, sys
from pathlib import Path
from potluck.adapters.sql import open_store

async def run():
    store = await open_store(Path(sys.argv[1]))
    async def client():
        while True:
            offset = await store.transact(lambda tx: tx.events.append(1, "k", "s", "{}"))
            print(offset, flush=True)
    await asyncio.gather(*(client() for _ in range(32)))

asyncio.run(run())
"""


@pytest.mark.parametrize("after_lines", [1, 200, 3_000])
def test_killed_in_the_middle_of_commits_it_loses_nothing_acknowledged(
    tmp_path: Path, after_lines: int
) -> None:
    path = tmp_path / "potluck.db"
    with subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(path)], stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        lines = [victim.stdout.readline() for _ in range(after_lines)]
        time.sleep(0.01)
        os.kill(victim.pid, signal.SIGKILL)
        lines += victim.stdout.readlines()
    acknowledged = {int(line) for line in lines if line.endswith("\n")}

    async def read() -> None:
        store = await open_store(path)
        kept = {row.offset for row in await store.transact(lambda tx: tx.events.after(0, 10**6))}
        await store.close()
        assert acknowledged <= kept
        assert kept == set(range(1, len(kept) + 1))

    asyncio.run(read())
