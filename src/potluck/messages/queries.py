"""Reads and writes that a gateway passes on to a coordinator, which alone has the database."""

from typing import Literal

import msgspec

from potluck.core.ids import AccountId, KeyId
from potluck.messages.envelope import Body

What = Literal[
    "key",
    "nodes",
    "models",
    "accounts",
    "account",
    "keys",
    "receipt",
    "receipts",
    "ledger",
    "holds",
    "events",
    "status",
]
Order = Literal["create_account", "create_key", "revoke_key", "deposit"]


class Query(Body):
    """Verb `query`: answered by `Answer`, seen no earlier than `at_least_offset`."""

    what: What
    args: dict[str, str]
    at_least_offset: int = 0


class Command(Body):
    """Verb `command`: answered by `Answer`. The same id again is answered alike."""

    id: str
    order: Order
    args: dict[str, str]


class Answer(Body):
    """`refusal` empty: `data` is JSON as `/api/v1` shows it. `offset`: the event feed's."""

    refusal: str
    offset: int
    data: bytes
    message: str = ""


class KeyRecord(msgspec.Struct, frozen=True):
    """`data` of the query `key`: what a gateway must know of an API key. Cached briefly."""

    id: KeyId
    account: AccountId
    expires_ms: int | None
    """By the coordinator's clock; `lives_ms` is what a gateway measures."""
    lives_ms: int | None
    """Milliseconds left when this was answered; None: it does not expire."""
    admin: bool


query_decoder = msgspec.msgpack.Decoder(Query)
command_decoder = msgspec.msgpack.Decoder(Command)
answer_decoder = msgspec.msgpack.Decoder(Answer)
key_record_decoder = msgspec.json.Decoder(KeyRecord)
