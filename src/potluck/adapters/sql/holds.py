"""Standing holds. Only settled amount, expiry and state change."""

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from potluck.core.holds import Hold
from potluck.core.ids import AccountId, HoldId
from potluck.ports.store import ROWS_ALL, HoldRow

_COLUMNS: Final = (
    "id, account, gateway, boot, amount_micro, settled_micro, expires_ms, state, "
    "want_micro, grant_key, opened_ms"
)
_SELECT: Final = f"SELECT {_COLUMNS} FROM holds"  # noqa: S608
_GET: Final = _SELECT + " WHERE id = ?"
_INSERT: Final = f"INSERT INTO holds ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
_UPDATE: Final = "UPDATE holds SET settled_micro = ?, expires_ms = ?, state = ? WHERE id = ?"
_OPEN_OF: Final = _SELECT + " WHERE account = ? AND state = 'open' ORDER BY id"
_OPEN_UNTIL: Final = (
    _SELECT + " WHERE state = 'open' AND expires_ms <= ? ORDER BY expires_ms, id LIMIT ?"
)
_PENDING: Final = (
    "SELECT account, sum(amount_micro - settled_micro) FROM holds WHERE state = 'open' "
    "GROUP BY account ORDER BY account"
)
_COUNT: Final = "SELECT count(*) FROM (SELECT 1 FROM holds WHERE state = 'open' LIMIT ?)"
_LIST_OPEN: Final = _SELECT + " WHERE state = 'open' ORDER BY expires_ms, id LIMIT ?"
_POSTPONE: Final = "UPDATE holds SET expires_ms = expires_ms + ? WHERE state = 'open'"


class SqlHolds:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, hold: HoldId) -> HoldRow | None:
        found = self._connection.execute(_GET, (hold,)).fetchone()
        return None if found is None else _made(found)

    def insert(self, row: HoldRow) -> None:
        hold = row.hold
        self._connection.execute(
            _INSERT,
            (
                *(hold.id, hold.account, hold.gateway, hold.boot, hold.amount_micro),
                *(hold.settled_micro, hold.expires_ms, hold.state),
                *(row.want_micro, row.grant_key, row.opened_ms),
            ),
        )

    def update(self, hold: Hold) -> None:
        self._connection.execute(
            _UPDATE, (hold.settled_micro, hold.expires_ms, hold.state, hold.id)
        )

    def open_of(self, account: AccountId) -> Sequence[HoldRow]:
        return [_made(found) for found in self._connection.execute(_OPEN_OF, (account,))]

    def open_until(self, expires_ms_max: int, limit: int) -> Sequence[HoldRow]:
        found = self._connection.execute(_OPEN_UNTIL, (expires_ms_max, limit))
        return [_made(one) for one in found]

    def pending_sums(self) -> Sequence[tuple[AccountId, int]]:
        return [(AccountId(account), rest) for account, rest in self._connection.execute(_PENDING)]

    def count_open(self, limit: int = ROWS_ALL) -> int:
        return int(self._connection.execute(_COUNT, (limit,)).fetchone()[0])

    def list_open(self, limit: int) -> Sequence[HoldRow]:
        return [_made(found) for found in self._connection.execute(_LIST_OPEN, (limit,))]

    def postpone(self, by_ms: int) -> None:
        self._connection.execute(_POSTPONE, (by_ms,))

    def settled(self) -> Sequence[Hold]:
        return [_made(found).hold for found in self._connection.execute(_SELECT)]


def _made(found: tuple[Any, ...]) -> HoldRow:
    hold = Hold(
        id=found[0],
        account=found[1],
        gateway=found[2],
        boot=found[3],
        amount_micro=found[4],
        settled_micro=found[5],
        expires_ms=found[6],
        state=found[7],
    )
    return HoldRow(hold=hold, want_micro=found[8], grant_key=found[9], opened_ms=found[10])
