"""Balances, kept in memory for the length of one group and written once at its end.

A hot account is met by every item of a group. The group holds the write lock, so that nobody
else can have changed it; an item that fails takes its changes back with its savepoint.
"""

import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.core.ids import AccountId
from potluck.core.ledger import Balance

_GET: Final = "SELECT posted_micro, pending_micro FROM balances WHERE account = ?"
_PUT: Final = (
    "INSERT INTO balances (account, posted_micro, pending_micro) VALUES (?, ?, ?) "
    "ON CONFLICT (account) DO UPDATE SET posted_micro = excluded.posted_micro, "
    "pending_micro = excluded.pending_micro"
)
_LIST: Final = "SELECT account, posted_micro, pending_micro FROM balances ORDER BY account"
_NONE: Final = Balance()


class SqlBalances:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._known: dict[AccountId, Balance] = {}
        self._changed: set[AccountId] = set()
        """By items of this group that succeeded, or by the one that runs."""
        self._before: dict[AccountId, Balance] = {}
        """What the item that runs found and then changed."""

    def get(self, account: AccountId) -> Balance:
        known = self._known.get(account)
        if known is None:
            found = self._connection.execute(_GET, (account,)).fetchone()
            known = (
                _NONE if found is None else Balance(posted_micro=found[0], pending_micro=found[1])
            )
            self._known[account] = known
        return known

    def put(self, account: AccountId, balance: Balance) -> None:
        if account not in self._before:
            self._before[account] = self.get(account)
        self._known[account] = balance
        self._changed.add(account)

    def list(self) -> Sequence[tuple[AccountId, Balance]]:
        self.write()
        return [
            (AccountId(account), Balance(posted_micro=posted_micro, pending_micro=pending_micro))
            for account, posted_micro, pending_micro in self._connection.execute(_LIST)
        ]

    def keep(self) -> None:
        """The item succeeded."""
        self._before.clear()

    def take_back(self) -> None:
        """The item failed and its savepoint was rolled back."""
        # What `list` had written is gone from SQL with the savepoint, even where it came from
        # items before: so everything that this group changed stays marked.
        self._known.update(self._before)
        self._before.clear()

    def write(self) -> None:
        values = []
        for account in self._changed:
            balance = self._known[account]
            values.append((account, balance.posted_micro, balance.pending_micro))
        self._connection.executemany(_PUT, values)

    def forget(self) -> None:
        """The group ended."""
        self._known.clear()
        self._changed.clear()
        self._before.clear()
