"""Refusals as HTTP shows them: status, JSON document and headers, from the one table of causes."""

from dataclasses import dataclass
from typing import Final

import msgspec

from potluck.core.refusals import Refusal
from potluck.messages import errors

Headers = list[tuple[bytes, bytes]]
RETRY_AFTER_S: Final = b"1"
JSON: Final = (b"content-type", b"application/json")

MESSAGES: Final[dict[Refusal, str]] = {
    Refusal.BODY_TOO_LARGE: "The body is larger than this gateway accepts.",
    Refusal.HEAD_TOO_LARGE: "The request's line and headers are larger than this gateway accepts.",
    Refusal.CLIENT_TOO_SLOW: "The request did not arrive in time.",
    Refusal.METHOD_NOT_ALLOWED: "This path does not know that method.",
    Refusal.NOT_FOUND: "There is nothing at this path.",
    Refusal.MODEL_NOT_FOUND: "No node of this pool serves that model.",
    Refusal.INVALID_KEY: "The API key is missing or unknown. Send 'Authorization: Bearer pk_...'.",
    Refusal.EXPIRED_KEY: "The API key has expired.",
    Refusal.REVOKED_KEY: "The API key was revoked.",
    Refusal.FORBIDDEN: "This key may not do that.",
    Refusal.INSUFFICIENT_FUNDS: "The account has too little money for what this may cost.",
    Refusal.TOO_MANY_HOLDS: "The account has too many open holds.",
    Refusal.RATE_LIMITED: "Too many requests of this key are in flight.",
    Refusal.OVERLOADED: "Too many requests are in flight on this gateway.",
    Refusal.NO_CAPACITY: "No node that serves the model can take the request now.",
    Refusal.COORDINATOR_UNAVAILABLE: "No coordinator answered in time.",
    Refusal.SHUTTING_DOWN: "This gateway is shutting down.",
    Refusal.TIMED_OUT: "The answer did not come in time.",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A refusal with what the requester should know about it."""

    refusal: Refusal
    message: str = ""
    param: str | None = None


class ProblemError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.refusal)
        self.problem = problem


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _Document(msgspec.Struct):
    error: _Error


def document(problem: Problem) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    line = errors.SHOWN[problem.refusal]
    message = problem.message or MESSAGES.get(problem.refusal, problem.refusal.value)
    error = _Error(message=message, type=line.type, param=problem.param, code=problem.refusal.value)
    return msgspec.json.encode(_Document(error))


def headers(problem: Problem) -> Headers:
    line = errors.SHOWN[problem.refusal]
    found: Headers = [JSON]
    if line.retry and line.http_status in (429, 503):
        found.append((b"retry-after", RETRY_AFTER_S))
    should_retry = errors.should_retry_header(line)
    if line.http_status == 402:  # Said, so that nobody hammers an empty account.
        should_retry = b"false"
    if should_retry is not None:
        found.append((b"x-should-retry", should_retry))
    if line.http_status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    return found


def status(problem: Problem) -> int:
    return errors.SHOWN[problem.refusal].http_status
