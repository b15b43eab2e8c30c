"""Everything but the token path, by path: health, models, and the native API.

The token path itself (`POST /v1/chat/completions`) never arrives here: `protocol` answers it.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

import potluck
from potluck.core.refusals import Refusal
from potluck.gateway.http import access, errors, gate, models
from potluck.gateway.http.asgi import App, Receive, Scope, Send, header, send_document, send_problem
from potluck.gateway.http.errors import Problem
from potluck.gateway.serving.serving import Serving

CHAT_PATH: Final = "/v1/chat/completions"
_READ: Final = "GET, HEAD, OPTIONS"


def create(serving: Serving, native: Callable[[], Awaitable[App]]) -> App:
    """`native` gives the application under `/api/v1`, which is loaded beside the first requests."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        path: str = scope["path"]
        if path.startswith(gate.PREFIX + "/") or path == gate.PREFIX:
            admitted = await gate.admit(serving, scope, receive, send)
            if admitted is not None:
                await (await native())(scope, admitted, send)
        elif path == CHAT_PATH:
            await _chat(scope, send)
        elif path in _PAGES or path.startswith("/v1/models/"):
            await _page(serving, scope, send)
        else:
            await send_problem(send, Problem(Refusal.NOT_FOUND))

    return app


async def _chat(scope: Scope, send: Send) -> None:
    """What is not an ordinary POST."""
    allow = (b"allow", b"POST, OPTIONS")
    if scope["method"] == "OPTIONS":
        await send_document(send, 204, b"", [allow])
    elif scope["method"] == "POST":
        message = "This path does not upgrade connections."
        await send_problem(send, Problem(Refusal.INVALID_REQUEST, message))
    else:
        await send_problem(send, Problem(Refusal.METHOD_NOT_ALLOWED), allow)


async def _page(serving: Serving, scope: Scope, send: Send) -> None:
    method = scope["method"]
    allow = (b"allow", _READ.encode())
    if method == "OPTIONS":
        await send_document(send, 204, b"", [allow])
        return
    if method not in ("GET", "HEAD"):
        await send_problem(send, Problem(Refusal.METHOD_NOT_ALLOWED), allow)
        return
    page = _PAGES.get(scope["path"], _model)
    found = await page(serving, scope)
    if isinstance(found, Problem):
        await send_problem(send, found)
    else:
        await send_document(send, 200, found, [errors.JSON])


async def _front(_serving: Serving, _scope: Scope) -> bytes:
    """For whoever opens the bare address: where everything is."""
    return _FRONT


async def _healthy(_serving: Serving, _scope: Scope) -> bytes:
    return b'{"status":"ok"}'


async def _ready(serving: Serving, _scope: Scope) -> bytes | Problem:
    """A request would succeed now: a replica is ready, and a coordinator answers."""
    if serving.stopping:
        return Problem(Refusal.SHUTTING_DOWN)
    if not serving.table.known:
        return Problem(Refusal.COORDINATOR_UNAVAILABLE, "No coordinator has answered yet.")
    if not serving.table.usable:
        return Problem(Refusal.NO_CAPACITY, "No node has a model ready.")
    if not await serving.coordinator_answers():
        return Problem(Refusal.COORDINATOR_UNAVAILABLE)
    return msgspec.json.encode({"status": "ready", "models": list(serving.table.models)})


async def _models(serving: Serving, scope: Scope) -> bytes | Problem:
    key = await access.who(serving, header(scope, b"authorization"))
    return Problem(key) if isinstance(key, Refusal) else models.page(serving)


async def _model(serving: Serving, scope: Scope) -> bytes | Problem:
    key = await access.who(serving, header(scope, b"authorization"))
    if isinstance(key, Refusal):
        return Problem(key)
    found = models.one(serving, scope["path"].removeprefix("/v1/models/"))
    return Problem(Refusal.MODEL_NOT_FOUND, param="model") if found is None else found


_FRONT: Final = msgspec.json.encode(
    {
        "name": "Potluck",
        "version": potluck.__version__,
        "openai": "/v1",
        "models": "/v1/models",
        "api": gate.PREFIX,
        "docs": gate.PREFIX + "/docs",
        "ready": "/readyz",
        "key": "Models, answers and the API ask for the header 'Authorization: Bearer pk_...'.",
    }
)
_PAGES: Final = {"/": _front, "/healthz": _healthy, "/readyz": _ready, "/v1/models": _models}
