"""What a commit causes to be said, said after it: at once, and again after a crash in between.

A row is removed only after its message was handed to the bus while that was connected, and it
still is: what a connection took to its end may be lost, and is told again. Told twice is harmless,
since every message says by its ids what it is about.
"""

from collections.abc import Sequence

from potluck.coordinator.mail import Mail
from potluck.core import parameters
from potluck.ports.store import OutboxRow, Store, Tx


class Outbox:
    def __init__(self, store: Store, mail: Mail) -> None:
        self._store = store
        self._mail = mail
        self._told: list[int] = []
        """Handed to the bus and not yet removed."""

    async def flush(self) -> None:
        """Tells all that waits. Not to run twice at once."""
        while True:
            rows = await self._next_page()
            for row in rows:
                if not self._mail.send(row.subject, row.body):
                    return
                self._told.append(row.id)
            if len(rows) < parameters.outbox_page:
                return

    async def _next_page(self) -> Sequence[OutboxRow]:
        """Removes what was told and reads what was not, in one transaction."""
        told = self._told if self._mail.connected else []
        rows = await self._store.transact(lambda tx: _turn(tx, told))
        self._told = []
        return rows


def _turn(tx: Tx, told: Sequence[int]) -> Sequence[OutboxRow]:
    if told:
        tx.outbox.remove(told)
    return tx.outbox.pending(parameters.outbox_page)
