"""`/api/v1`: the network's own API, in a framework that documents it.

The gateway has no database: each read is a query, each write a command to a coordinator, whose JSON
goes through unchanged. What a key may see is decided here: an admin's all, others' only their own.
"""

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from swagger_ui_bundle import swagger_ui_path

import potluck
from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.gateway.http import access, errors
from potluck.gateway.http.asgi import App
from potluck.gateway.http.errors import Problem
from potluck.gateway.serving.serving import Serving
from potluck.messages import views
from potluck.messages.queries import Answer, KeyRecord

OFFSET_HEADER: Final = "x-potluck-offset"
_PREFIX: Final = "/api/v1"
_SHOWN: Final[dict[str, Any]] = {
    "/status": views.StatusView,
    "/nodes": views.Page[views.NodeView],
    "/models": views.Page[views.ModelView],
    "/accounts": views.Page[views.AccountView],
    "/accounts/{account}": views.AccountView,
    "/accounts/{account}/deposit": views.AccountView,
    "/keys": views.Page[views.KeyView],
    "/keys/{key}": views.KeyView,
    "/receipts": views.Page[views.ReceiptLineView],
    "/receipts/{receipt}": views.ReceiptView,
    "/ledger": views.Page[views.TransferView],
    "/holds": views.Page[views.HoldView],
    "/events": views.Page[views.EventView],
    "/whoami": views.KeyView,
}
_CREATED: Final[dict[str, Any]] = {
    "/accounts": views.AccountView,
    "/keys": views.CreatedKeyView,
}


class NewAccount(BaseModel):
    name: str = Field(min_length=1, max_length=128)
    kind: str = Field(default="person", pattern="^(person|provider)$")


class NewKey(BaseModel):
    name: str = Field(default="", max_length=128)
    account: str | None = None
    admin: bool = False
    life_s: int | None = Field(default=None, ge=1, le=10 * 365 * 86_400)


class NewDeposit(BaseModel):
    amount_micro: int = Field(ge=1, le=2**53)


class _ProblemError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.refusal)
        self.problem = problem


class _Keys(msgspec.Struct):
    data: list[views.KeyView]


class _Feed(msgspec.Struct):
    data: list[views.EventView]
    offset: int


Limit = Annotated[int, Query(ge=1, le=parameters.events_page_max)]
Wait = Annotated[int, Query(ge=0, le=parameters.events_wait_ms)]
MinOffset = Annotated[
    int, Query(ge=0, description="Answer only once the event feed has come this far.")
]
Name = Annotated[str, Path(max_length=128, pattern="^[A-Za-z0-9_.-]+$")]


def create(serving: Serving) -> App:
    api = FastAPI(
        title="Potluck", version=potluck.__version__, root_path="", openapi_url=None, docs_url=None,
        redoc_url=None,
    )  # fmt: skip
    routes = _Routes(serving)
    routes.add_reads(api)
    routes.add_writes(api)
    _add_documents(api)
    _add_problems(api)
    return api


class _Routes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._key = Depends(self._who)

    async def _who(self, request: Request) -> KeyRecord:
        shown = request.headers.get("authorization", "").encode()
        key = await access.who(self._serving, shown)
        if isinstance(key, Refusal):
            raise _ProblemError(Problem(key))
        return key

    # Reads

    def add_reads(self, api: FastAPI) -> None:
        for path in ("/status", "/nodes", "/models"):
            self._add_open(api, path)
        for path in ("/accounts", "/keys", "/holds"):
            self._add_owned(api, path)
        self._add_accounts(api)
        self._add_receipts(api)
        self._add_events(api)

    def _add_accounts(self, api: FastAPI) -> None:
        key = self._key

        @api.get(_PREFIX + "/accounts/{account}")
        async def account(
            account: Name, who: KeyRecord = key, min_offset: MinOffset = 0
        ) -> Response:
            _own(who, account)
            return await self._read("account", {"account": account}, min_offset)

        @api.get(_PREFIX + "/whoami")
        async def whoami(who: KeyRecord = key) -> Response:
            found = await self._find_key(who.account, who.id)
            return _json(msgspec.json.encode(found))

    def _add_receipts(self, api: FastAPI) -> None:
        key = self._key

        @api.get(_PREFIX + "/receipts")
        async def receipts(
            who: KeyRecord = key, account: str | None = None, limit: Limit = 100,
            min_offset: MinOffset = 0,
        ) -> Response:  # fmt: skip
            args = {**_scope(who, account), "limit": str(limit)}
            return await self._read("receipts", args, min_offset)

        @api.get(_PREFIX + "/receipts/{receipt}")
        async def receipt(
            receipt: Name, who: KeyRecord = key, min_offset: MinOffset = 0
        ) -> Response:
            args = {"receipt": receipt} | _mine(who)
            return await self._read("receipt", args, min_offset)

        @api.get(_PREFIX + "/ledger")
        async def ledger(
            who: KeyRecord = key, account: str | None = None, cause: str | None = None,
            limit: Limit = 100, min_offset: MinOffset = 0,
        ) -> Response:  # fmt: skip
            args = {**_scope(who, account), "limit": str(limit)}
            if cause is not None:
                args["cause"] = cause
            return await self._read("ledger", args, min_offset)

    def _add_events(self, api: FastAPI) -> None:
        @api.get(_PREFIX + "/events")
        async def events(
            who: KeyRecord = self._key, after: Annotated[int, Query(ge=0)] = 0, limit: Limit = 100,
            follow: bool = False, wait_ms: Wait = 0,
        ) -> Response:  # fmt: skip
            _admin(who)
            if follow:
                return StreamingResponse(self._follow(after), media_type="text/event-stream")
            answer = await self._events(after, limit, wait_ms)
            return _through(answer)

    def _add_open(self, api: FastAPI, path: str) -> None:
        async def read(who: KeyRecord = self._key, min_offset: MinOffset = 0) -> Response:
            return await self._read(path[1:], {}, min_offset)

        api.get(_PREFIX + path, name=path[1:])(read)

    def _add_owned(self, api: FastAPI, path: str) -> None:
        async def read(
            who: KeyRecord = self._key, account: str | None = None, min_offset: MinOffset = 0
        ) -> Response:
            return await self._read(path[1:], _scope(who, account), min_offset)

        api.get(_PREFIX + path, name=path[1:])(read)

    # Writes

    def add_writes(self, api: FastAPI) -> None:
        key = self._key

        @api.post(_PREFIX + "/accounts", status_code=201)
        async def create_account(new: NewAccount, who: KeyRecord = key) -> Response:
            _admin(who)
            return await self._write("create_account", {"name": new.name, "kind": new.kind}, 201)

        @api.post(_PREFIX + "/accounts/{account}/deposit")
        async def deposit(account: Name, new: NewDeposit, who: KeyRecord = key) -> Response:
            _admin(who)
            args = {"account": account, "amount_micro": str(new.amount_micro)}
            return await self._write("deposit", args)

        @api.post(_PREFIX + "/keys", status_code=201)
        async def create_key(new: NewKey, who: KeyRecord = key) -> Response:
            account = new.account or who.account
            _own(who, account)
            if new.admin:
                _admin(who)
            args = {"account": account, "name": new.name, "admin": str(int(new.admin))}
            if new.life_s is not None:
                expires_ms = self._serving.clock.wall_ms() + new.life_s * 1000
                args["expires_ms"] = str(expires_ms)
            return await self._write("create_key", args, 201)

        @api.delete(_PREFIX + "/keys/{revoked}")
        async def revoke_key(revoked: Name, who: KeyRecord = key) -> Response:
            return await self._write("revoke_key", {"key": revoked} | _mine(who))

    # Coordinators

    async def _read(self, what: Any, args: dict[str, str], min_offset: int) -> Response:
        return _through(await self._ask(what, args, min_offset))

    async def _ask(self, what: Any, args: dict[str, str], min_offset: int = 0) -> Answer:
        return _settled(await self._serving.query(what, args, min_offset))

    async def _write(self, order: Any, args: dict[str, str], status: int = 200) -> Response:
        return _through(_settled(await self._serving.command(order, args)), status)

    async def _find_key(self, account: str, key: str) -> views.KeyView:
        answer = await self._ask("keys", {"account": account})
        for found in msgspec.json.decode(answer.data, type=_Keys).data:
            if found.id == key:
                return found
        raise _ProblemError(Problem(Refusal.KEY_NOT_FOUND))

    async def _events(self, after: int, limit: int, wait_ms: int) -> Answer:
        """Asks again until something happened, or `wait_ms` have passed."""
        clock = self._serving.clock
        ends_ms = clock.now_ms() + wait_ms
        while True:
            answer = await self._ask("events", {"after": str(after), "limit": str(limit)})
            left_ms = ends_ms - clock.now_ms()
            if left_ms <= 0 or self._serving.stopping or _events_in(answer):
                return answer
            await clock.sleep_ms(min(_POLL_MS, left_ms))

    async def _follow(self, after: int) -> AsyncIterator[bytes]:
        """Server-sent events, each with its offset as id; a comment while nothing happens."""
        offset = after
        while not self._serving.stopping:
            try:
                answer = await self._events(offset, 100, parameters.sse_comment_ms)
            except _ProblemError as error:
                yield b"event: error\ndata: %b\n\n" % errors.document(error.problem)
                return
            events = _events_in(answer)
            for event in events:
                offset = event.offset
                yield b"id: %d\ndata: %b\n\n" % (offset, msgspec.json.encode(event))
            if not events:
                yield b": keep-alive\n\n"


_POLL_MS: Final = 500


def _events_in(answer: Answer) -> list[views.EventView]:
    return msgspec.json.decode(answer.data, type=_Feed).data


def _scope(who: KeyRecord, account: str | None) -> dict[str, str]:
    """Whose things are listed: an admin's choice or all, others' only their own."""
    if account is not None:
        _own(who, account)
        return {"account": account}
    return {} if who.admin else {"account": who.account}


def _mine(who: KeyRecord) -> dict[str, str]:
    """The coordinator then answers as if others' things did not exist."""
    return {} if who.admin else {"account": who.account}


def _own(who: KeyRecord, account: str) -> None:
    if not who.admin and account != who.account:
        raise _ProblemError(Problem(Refusal.FORBIDDEN, param="account"))


def _admin(who: KeyRecord) -> None:
    if not who.admin:
        raise _ProblemError(Problem(Refusal.FORBIDDEN, "This needs an admin's key."))


def _settled(answer: Answer | None) -> Answer:
    if answer is None:
        raise _ProblemError(Problem(Refusal.COORDINATOR_UNAVAILABLE))
    if answer.refusal:
        try:
            refusal = Refusal(answer.refusal)
        except ValueError:
            refusal = Refusal.INTERNAL
        raise _ProblemError(Problem(refusal, answer.message))
    return answer


def _through(answer: Answer, status: int = 200) -> Response:
    return _json(answer.data, status, {OFFSET_HEADER: str(answer.offset)})


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _problem_response(problem: Problem) -> Response:
    headers = {name.decode(): value.decode() for name, value in errors.headers(problem)}
    return Response(errors.document(problem), errors.status(problem), headers)


def _add_problems(api: FastAPI) -> None:
    @api.exception_handler(_ProblemError)
    async def refused(_request: Request, error: _ProblemError) -> Response:
        return _problem_response(error.problem)

    @api.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
        problem = Problem(Refusal.INVALID_REQUEST, first["msg"], ".".join(place) or None)
        return _problem_response(problem)

    @api.exception_handler(HTTPException)
    async def framework(_request: Request, error: HTTPException) -> Response:
        by_status = {404: Refusal.NOT_FOUND, 405: Refusal.METHOD_NOT_ALLOWED}
        refusal = by_status.get(error.status_code, Refusal.INVALID_REQUEST)
        response = _problem_response(Problem(refusal))
        if error.headers and "allow" in {name.lower() for name in error.headers}:
            response.headers["allow"] = next(iter(error.headers.values()))
        return response


def _add_documents(api: FastAPI) -> None:
    """OpenAPI and its reader, from this machine alone."""
    made: dict[str, Any] = {}

    @api.get(_PREFIX + "/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if not made:
            made.update(_openapi(api))
        return _json(msgspec.json.encode(made))

    @api.get(_PREFIX + "/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url=_PREFIX + "/openapi.json",
            title="Potluck",
            swagger_js_url=_PREFIX + "/docs/files/swagger-ui-bundle.js",
            swagger_css_url=_PREFIX + "/docs/files/swagger-ui.css",
            swagger_favicon_url=_PREFIX + "/docs/files/favicon-32x32.png",
        )

    api.mount(_PREFIX + "/docs/files", StaticFiles(directory=str(swagger_ui_path)))


def _openapi(api: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=api.title, version=api.version, routes=api.routes)
    shown = [*_SHOWN.values(), *_CREATED.values()]
    schemas, components = msgspec.json.schema_components(
        shown, ref_template="#/components/schemas/{name}"
    )
    reads = dict(zip(_SHOWN, schemas, strict=False))
    creations = dict(zip(_CREATED, schemas[len(_SHOWN) :], strict=True))
    found = document.setdefault("components", {}).setdefault("schemas", {})
    found.update(components)
    for path, methods in document["paths"].items():
        short = path.removeprefix(_PREFIX)
        short = re.sub(r"\{revoked\}", "{key}", short)
        for method, operation in methods.items():
            creation = method == "post" and short in _CREATED
            schema = creations[short] if creation else reads.get(short, {})
            status = "201" if creation else "200"
            content = {"application/json": {"schema": schema}}
            operation["responses"][status] = {"description": "As it is", "content": content}
            operation["security"] = [{"key": []}]
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document
