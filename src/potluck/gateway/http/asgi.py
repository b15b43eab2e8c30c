"""ASGI in a few words: read a bounded body, send a document."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from potluck.gateway.http import errors
from potluck.gateway.http.errors import Headers, Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


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
