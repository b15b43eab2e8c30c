"""One table: for each cause its HTTP status, its OpenAI error type, its exit code, and retrying.

SDKs retry 408, 409, 429 and 5xx by themselves; `retry=False` on such a status is sent as
`x-should-retry: false`. The cause itself is the wire code.
"""

from typing import Final, NamedTuple

from potluck.core.refusals import Refusal


class Shown(NamedTuple):
    http_status: int
    type: str
    exit_code: int
    retry: bool


OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
NO_CAPACITY: Final = 4
NO_FUNDS: Final = 5
REFUSED: Final = 6
TIMED_OUT: Final = 124

_BAD = "invalid_request_error"
_AUTH = "authentication_error"
_SERVER = "server_error"

SHOWN: Final[dict[Refusal, Shown]] = {
    Refusal.INVALID_REQUEST: Shown(400, _BAD, USAGE, False),
    Refusal.BODY_TOO_LARGE: Shown(413, _BAD, USAGE, False),
    Refusal.HEAD_TOO_LARGE: Shown(431, _BAD, USAGE, False),
    Refusal.CONTEXT_LENGTH_EXCEEDED: Shown(400, _BAD, USAGE, False),
    Refusal.UNSUPPORTED_PARAMETER: Shown(400, _BAD, USAGE, False),
    Refusal.METHOD_NOT_ALLOWED: Shown(405, _BAD, USAGE, False),
    Refusal.NOT_FOUND: Shown(404, _BAD, NOT_FOUND, False),
    Refusal.MODEL_NOT_FOUND: Shown(404, _BAD, NOT_FOUND, False),
    Refusal.RECEIPT_NOT_FOUND: Shown(404, _BAD, NOT_FOUND, False),
    Refusal.ACCOUNT_NOT_FOUND: Shown(404, _BAD, NOT_FOUND, False),
    Refusal.KEY_NOT_FOUND: Shown(404, _BAD, NOT_FOUND, False),
    Refusal.INVALID_KEY: Shown(401, _AUTH, REFUSED, False),
    Refusal.EXPIRED_KEY: Shown(401, _AUTH, REFUSED, False),
    Refusal.REVOKED_KEY: Shown(401, _AUTH, REFUSED, False),
    Refusal.FORBIDDEN: Shown(403, "permission_error", REFUSED, False),
    Refusal.INSUFFICIENT_FUNDS: Shown(402, "insufficient_funds", NO_FUNDS, False),
    Refusal.UNKNOWN_HOLD: Shown(404, _BAD, NOT_FOUND, False),
    Refusal.HOLD_VOIDED: Shown(409, _BAD, REFUSED, False),
    Refusal.HOLD_EXHAUSTED: Shown(402, "insufficient_funds", NO_FUNDS, False),
    Refusal.ID_REUSED: Shown(409, _BAD, REFUSED, False),
    Refusal.TOO_MANY_HOLDS: Shown(429, "rate_limit_error", NO_CAPACITY, True),
    Refusal.RATE_LIMITED: Shown(429, "rate_limit_error", NO_CAPACITY, True),
    Refusal.OVERLOADED: Shown(503, _SERVER, NO_CAPACITY, True),
    Refusal.NO_CAPACITY: Shown(503, _SERVER, NO_CAPACITY, True),
    Refusal.COORDINATOR_UNAVAILABLE: Shown(503, _SERVER, NO_CAPACITY, True),
    Refusal.TIMED_OUT: Shown(504, _SERVER, TIMED_OUT, True),
    Refusal.CLIENT_TOO_SLOW: Shown(408, _BAD, TIMED_OUT, False),
    Refusal.SHUTTING_DOWN: Shown(503, _SERVER, NO_CAPACITY, True),
    Refusal.STORE_FULL: Shown(507, _SERVER, FAILED, False),
    Refusal.NODE_LOST: Shown(502, _SERVER, FAILED, True),
    Refusal.NODE_BUSY: Shown(503, _SERVER, NO_CAPACITY, True),
    Refusal.ENGINE_FAILED: Shown(502, _SERVER, FAILED, True),
    Refusal.MODEL_NOT_LOADED: Shown(503, _SERVER, NO_CAPACITY, True),
    Refusal.STREAM_BROKEN: Shown(502, _SERVER, FAILED, True),
    Refusal.CANCELLED: Shown(499, _BAD, FAILED, False),
    Refusal.FORGED: Shown(403, "permission_error", REFUSED, False),
    Refusal.REPLAYED: Shown(409, _BAD, REFUSED, False),
    Refusal.MALFORMED: Shown(400, _BAD, USAGE, False),
    Refusal.PRICE_MISMATCH: Shown(409, _BAD, REFUSED, False),
    Refusal.DIGEST_MISMATCH: Shown(502, _SERVER, FAILED, False),
    Refusal.WIRE_VERSION: Shown(400, _BAD, REFUSED, False),
    Refusal.INTERNAL: Shown(500, _SERVER, FAILED, True),
}
RETRIED_BY_SDKS: Final = frozenset({408, 409, 429})


def shown(code: str) -> Shown:
    """The table's line for a code from the wire; an unknown one is a fault of the server."""
    try:
        return SHOWN[Refusal(code)]
    except ValueError:
        return SHOWN[Refusal.INTERNAL]


def should_retry_header(line: Shown) -> bytes | None:
    """`false` where an SDK would retry in vain; otherwise no header."""
    retried = line.http_status in RETRIED_BY_SDKS or line.http_status >= 500
    return b"false" if retried and not line.retry else None
