"""Durable ledger transfers a second through the store, against a peer and a limit in the same run.

Peer: one transaction a transfer on plain `sqlite3`. Limit: the same rows by one `executemany`.
"""

import argparse
import asyncio
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from potluck.adapters.sql import connections, open_store
from potluck.core import ledger
from potluck.core.ids import AccountId, TransferId
from potluck.core.ledger import Balance
from potluck.core.refusals import Refusal
from potluck.ports.store import Store, TransferRow, Tx

ACCOUNTS = 100
TRANSFERS = 40_000
PEER_TRANSFERS = 1_000
IN_FLIGHT = 2_048
FUNDS_MICRO = 10**12


def row(number: int) -> TransferRow:
    return TransferRow(
        id=TransferId(f"tr_{number:026d}"),
        kind="usage",
        payer=AccountId(f"acc_{number % ACCOUNTS:04d}"),
        payee=AccountId(f"acc_{(number * 7 + 1) % ACCOUNTS:04d}"),
        amount_micro=1 + number % 97,
        cause=f"rcp_{number:026d}_1",
        hold=None,
        at_ms=1_800_000_000_000 + number // 50,
    )


def transfer(line: TransferRow) -> Callable[[Tx], None]:
    def work(tx: Tx) -> None:
        if line.payer == line.payee:
            return
        posted = ledger.post(
            tx.balances.get(line.payer), tx.balances.get(line.payee), line.amount_micro
        )
        assert not isinstance(posted, Refusal)
        tx.balances.put(line.payer, posted[0])
        tx.balances.put(line.payee, posted[1])
        tx.transfers.insert(line)

    return work


def fund(tx: Tx) -> None:
    for number in range(ACCOUNTS):
        tx.balances.put(AccountId(f"acc_{number:04d}"), Balance(posted_micro=FUNDS_MICRO))


async def through_store(path: Path, count: int) -> float:
    store = await open_store(path)
    try:
        await store.transact(fund)
        lines = iter([row(number) for number in range(count)])
        started = time.perf_counter()
        await asyncio.gather(*(_client(store, lines) for _ in range(IN_FLIGHT)))
        return count / (time.perf_counter() - started)
    finally:
        await store.close()


async def _client(store: Store, lines: "object") -> None:
    for line in lines:  # type: ignore[attr-defined]
        await store.transact(transfer(line))


def one_by_one(path: Path, count: int) -> float:
    connection = _fresh(path)
    started = time.perf_counter()
    for number in range(count):
        line = row(number)
        connection.execute("BEGIN IMMEDIATE")
        for account, change in ((line.payer, -line.amount_micro), (line.payee, line.amount_micro)):
            connection.execute(
                "UPDATE balances SET posted_micro = posted_micro + ? WHERE account = ?",
                (change, account),
            )
        connection.execute(_INSERT, _values(line))
        connection.execute("COMMIT")
    rate = count / (time.perf_counter() - started)
    connection.close()
    return rate


def bare(path: Path, count: int) -> float:
    connection = _fresh(path)
    values = [_values(row(number)) for number in range(count)]
    started = time.perf_counter()
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(_INSERT, values)
    connection.execute("COMMIT")
    rate = count / (time.perf_counter() - started)
    connection.close()
    return rate


_INSERT = "INSERT INTO transfers VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


def _values(line: TransferRow) -> tuple[object, ...]:
    return (
        *(line.id, line.kind, line.payer, line.payee),
        *(line.amount_micro, line.cause, line.hold, line.at_ms),
    )


def _fresh(path: Path) -> sqlite3.Connection:
    connection = connections.connect(path)
    connections.prepare(connection)
    connection.executemany(
        "INSERT INTO balances VALUES (?, ?, 0)",
        [(f"acc_{number:04d}", FUNDS_MICRO) for number in range(ACCOUNTS)],
    )
    return connection


def run(folder: Path | None = None, rounds: int = 3) -> dict[str, float]:
    """Best of `rounds`, which follow each other in turn; rates are transfers a second.

    `folder` must lie on a real disk: where fsync costs nothing, the figures mean nothing.
    """
    best = {"store": 0.0, "peer": 0.0, "limit": 0.0}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder or Path.cwd()) as name:
            here = Path(name)
            best["store"] = max(
                best["store"], asyncio.run(through_store(here / "store.db", TRANSFERS))
            )
            best["peer"] = max(best["peer"], one_by_one(here / "peer.db", PEER_TRANSFERS))
            best["limit"] = max(best["limit"], bare(here / "limit.db", TRANSFERS))
    return {
        "store_per_s": round(best["store"]),
        "peer_per_s": round(best["peer"]),
        "limit_per_s": round(best["limit"]),
        "times_peer": round(best["store"] / best["peer"], 1),
        "share_of_limit": round(best["store"] / best["limit"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="on a real disk; default: the current one")
    given = parser.parse_args()
    found = run(given.folder)
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:16} {value:>12,}")


if __name__ == "__main__":
    main()
