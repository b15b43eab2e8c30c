"""Why a rule said no. Causes are stable: programs depend on them, so none is ever renamed.

`messages/errors.py` gives each its HTTP status and exit code; this is the only list.
"""

from enum import StrEnum


class Refusal(StrEnum):
    # The request
    INVALID_REQUEST = "invalid_request"
    BODY_TOO_LARGE = "body_too_large"
    HEAD_TOO_LARGE = "head_too_large"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    RECEIPT_NOT_FOUND = "receipt_not_found"
    ACCOUNT_NOT_FOUND = "account_not_found"
    KEY_NOT_FOUND = "key_not_found"
    # Who asks
    INVALID_KEY = "invalid_key"
    EXPIRED_KEY = "expired_key"
    REVOKED_KEY = "revoked_key"
    FORBIDDEN = "forbidden"
    # Money
    INSUFFICIENT_FUNDS = "insufficient_funds"
    UNKNOWN_HOLD = "unknown_hold"
    HOLD_VOIDED = "hold_voided"
    HOLD_EXHAUSTED = "hold_exhausted"
    ID_REUSED = "id_reused"
    TOO_MANY_HOLDS = "too_many_holds"
    # Capacity and time
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    NO_CAPACITY = "no_capacity"
    COORDINATOR_UNAVAILABLE = "coordinator_unavailable"
    TIMED_OUT = "timed_out"
    CLIENT_TOO_SLOW = "client_too_slow"
    SHUTTING_DOWN = "shutting_down"
    STORE_FULL = "store_full"
    # What a node said or did
    NODE_LOST = "node_lost"
    NODE_BUSY = "node_busy"
    ENGINE_FAILED = "engine_failed"
    MODEL_NOT_LOADED = "model_not_loaded"
    STREAM_BROKEN = "stream_broken"
    CANCELLED = "cancelled"
    # What a peer claimed
    FORGED = "forged"
    REPLAYED = "replayed"
    MALFORMED = "malformed"
    PRICE_MISMATCH = "price_mismatch"
    DIGEST_MISMATCH = "digest_mismatch"
    WIRE_VERSION = "wire_version"
    INTERNAL = "internal"
