"""ASGI in a few words: read a bounded body, send a document."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from potluck.core.refusals import Refusal
from potluck.gateway.http import errors
from potluck.gateway.http.errors import Headers, Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def read_body(receive: Receive, bytes_max: int) -> bytes | Refusal:
    """All of it, or nothing: half a body may read like a whole one.

    `BODY_TOO_LARGE`, or `CANCELLED` if the client left before its end.
    """
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return Refusal.CANCELLED
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes > bytes_max:
            return Refusal.BODY_TOO_LARGE
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_document(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", b"%d" % len(body))
    start = {"type": "http.response.start", "status": status, "headers": [*headers, length]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def send_problem(send: Send, problem: Problem, *more: tuple[bytes, bytes]) -> None:
    headers = [*errors.headers(problem), *more]
    await send_document(send, errors.status(problem), errors.document(problem), headers)


def header(scope: Scope, name: bytes) -> bytes:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found
