"""What to do about each refusal, in words for whoever typed the command.

Rule: no mend sends the reader to the command that has just failed.
"""

from typing import Final

from potluck.core.refusals import Refusal

UNREACHABLE: Final = "unreachable"
"""The client's own cause: no refusal, since nobody answered."""

_AGAIN = "try again in a few seconds"
_OWNERS = "show this to the pool's owner, with the logs in its data folder"
_VALUE = "change what was asked; --help says what the command takes"
_KEY = "give another with --api-key or POTLUCK_API_KEY, or ask the pool's owner for one"
_NODES = "try again when a node is ready: `potluck nodes` shows them"

MENDS: Final[dict[str, str]] = {
    UNREACHABLE: "start the pool with `potluck up`; if it runs elsewhere, check --url",
    Refusal.INVALID_REQUEST: _VALUE,
    Refusal.BODY_TOO_LARGE: "ask for less at once",
    Refusal.HEAD_TOO_LARGE: "give shorter values",
    Refusal.CONTEXT_LENGTH_EXCEEDED: "shorten the question; `potluck models` shows each context",
    Refusal.UNSUPPORTED_PARAMETER: _VALUE,
    Refusal.METHOD_NOT_ALLOWED: "check --url: is it a pool of this version?",
    Refusal.NOT_FOUND: "check --url: is it a pool of this version?",
    Refusal.MODEL_NOT_FOUND: "`potluck models` lists what is served",
    Refusal.RECEIPT_NOT_FOUND: "`potluck receipt list` shows yours; a new one takes a second",
    Refusal.ACCOUNT_NOT_FOUND: "check the id; `potluck balance` shows your own account's",
    Refusal.KEY_NOT_FOUND: "`potluck keys list` shows the ids of your keys",
    Refusal.INVALID_KEY: _KEY,
    Refusal.EXPIRED_KEY: _KEY,
    Refusal.REVOKED_KEY: _KEY,
    Refusal.FORBIDDEN: "use an admin's key, or ask the pool's owner to do it",
    Refusal.INSUFFICIENT_FUNDS: "`potluck balance` shows what is left and what is on hold",
    Refusal.UNKNOWN_HOLD: _AGAIN,
    Refusal.HOLD_VOIDED: _AGAIN,
    Refusal.HOLD_EXHAUSTED: "`potluck balance` shows what is left and what is on hold",
    Refusal.ID_REUSED: "give what is new a new id",
    Refusal.TOO_MANY_HOLDS: "try again when other requests have ended",
    Refusal.RATE_LIMITED: "try again when other requests have ended",
    Refusal.OVERLOADED: _AGAIN,
    Refusal.NO_CAPACITY: _NODES,
    Refusal.COORDINATOR_UNAVAILABLE: f"it comes back by itself; {_AGAIN}",
    Refusal.TIMED_OUT: _NODES,
    Refusal.CLIENT_TOO_SLOW: "try again over a faster connection",
    Refusal.SHUTTING_DOWN: "wait for the end, then start the pool again with `potluck up`",
    Refusal.STORE_FULL: "make room on the disk of the pool's data folder",
    Refusal.NODE_LOST: f"nothing that was not shown is billed; {_AGAIN}",
    Refusal.NODE_BUSY: _NODES,
    Refusal.ENGINE_FAILED: f"nothing that was not shown is billed; {_AGAIN}",
    Refusal.MODEL_NOT_LOADED: _NODES,
    Refusal.STREAM_BROKEN: f"nothing that was not shown is billed; {_AGAIN}",
    Refusal.CANCELLED: "ask again",
    Refusal.FORGED: _OWNERS,
    Refusal.REPLAYED: _OWNERS,
    Refusal.MALFORMED: _VALUE,
    Refusal.PRICE_MISMATCH: _AGAIN,
    Refusal.DIGEST_MISMATCH: _OWNERS,
    Refusal.WIRE_VERSION: "use the same version of Potluck on both sides",
    Refusal.INTERNAL: _OWNERS,
}


def mend(code: str) -> str:
    """A code that this version does not know is a fault of the server's."""
    return MENDS.get(code, _OWNERS)
