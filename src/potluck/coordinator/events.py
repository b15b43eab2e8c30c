"""Words for the event feed: what happened, to whom, in the past tense."""

from typing import Literal

import msgspec

from potluck.ports.store import Tx

Kind = Literal[
    "account_created",
    "key_created",
    "key_revoked",
    "deposited",
    "deployment_changed",
    "gateway_joined",
    "node_joined",
    "node_alive",
    "node_suspect",
    "node_dead",
    "node_left",
    "evictions_frozen",
    "evictions_resumed",
    "hold_opened",
    "hold_released",
    "hold_expired",
    "receipt_settled",
    "receipt_refused",
    "receipts_differ",
]


def record(tx: Tx, at_ms: int, kind: Kind, subject: str, /, **data: object) -> int:
    """Appends to the feed in the transaction of its cause. The event's offset."""
    return tx.events.append(at_ms, kind, subject, msgspec.json.encode(data).decode())
