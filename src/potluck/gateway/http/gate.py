"""In front of the native API: its framework reads a whole body before it asks who sent it.

Rule: who asks is known before a byte of the body is read, and the body is bounded.
"""

from typing import Final

from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.gateway.http import access
from potluck.gateway.http.asgi import (
    Message,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    send_problem,
)
from potluck.gateway.http.errors import Problem
from potluck.gateway.serving.serving import Serving

PREFIX: Final = "/api/v1"
_OPEN: Final = (PREFIX + "/openapi.json", PREFIX + "/docs")


async def admit(serving: Serving, scope: Scope, receive: Receive, send: Send) -> Receive | None:
    """Leaves the key's record in the request's state, and gives what replays the body.

    None: refused, and answered.
    """
    if not scope["path"].startswith(_OPEN):
        key = await access.who(serving, header(scope, b"authorization"))
        if isinstance(key, Refusal):
            await send_problem(send, Problem(key))
            return None
        scope.setdefault("state", {})["key"] = key
    announced = header(scope, b"content-length")
    body: bytes | Refusal = Refusal.BODY_TOO_LARGE
    if not announced or int(announced) <= parameters.native_body_bytes_max:
        body = await read_body(receive, parameters.native_body_bytes_max)
    if isinstance(body, Refusal):
        await send_problem(send, Problem(body))
        return None
    return _replay(body, receive)


def _replay(body: bytes, receive: Receive) -> Receive:
    said = False

    async def replayed() -> Message:
        nonlocal said
        if said:
            return await receive()  # That the client left.
        said = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
