"""`/api/v1`: the network's own API, in a framework that documents it.

The gateway has no database: each read is a query, each write a command to a coordinator, whose JSON
goes through unchanged. What a key may see and do is in `rights`; `gate` has read the key and the
body before.
"""

import hashlib
from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

import potluck
from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.gateway.http import access, errors, openapi, rights
from potluck.gateway.http.asgi import App
from potluck.gateway.http.errors import Problem, ProblemError
from potluck.gateway.http.gate import PREFIX
from potluck.gateway.serving.serving import Serving
from potluck.messages import views
from potluck.messages.queries import Answer, KeyRecord, Order, What

OFFSET_HEADER: Final = "x-potluck-offset"
_OPEN: Final[tuple[What, ...]] = ("status", "nodes", "models")
_OWNED: Final[tuple[What, ...]] = ("accounts", "keys", "holds")


class NewAccount(BaseModel):
    name: str = Field(min_length=1, max_length=parameters.name_letters_max)
    kind: str = Field(default="person", pattern="^(person|provider)$")


class NewKey(BaseModel):
    name: str = Field(default="", max_length=parameters.name_letters_max)
    account: str | None = Field(default=None, max_length=parameters.id_letters_max)
    admin: bool = False
    life_s: int | None = Field(default=None, ge=1, le=parameters.key_life_s_max)


class NewDeposit(BaseModel):
    amount_micro: int = Field(ge=1, le=parameters.amount_micro_max)


class _Feed(msgspec.Struct):
    data: list[views.EventView]
    offset: int


Limit = Annotated[int, Query(ge=1, le=parameters.events_page_max)]
Wait = Annotated[int, Query(ge=0, le=parameters.events_wait_ms)]
MinOffset = Annotated[
    int,
    Query(
        ge=0,
        le=parameters.offset_max,
        description="Answer only once the event feed has come this far.",
    ),
]
After = Annotated[int, Query(ge=0, le=parameters.offset_max)]
Name = Annotated[str, Path(max_length=parameters.id_letters_max, pattern="^[A-Za-z0-9_.-]+$")]
Account = Annotated[str | None, Query(max_length=parameters.id_letters_max)]
Once = Annotated[
    str | None,
    Header(
        alias="idempotency-key",
        description="The same write under the same key is done once, and answered alike.",
    ),
]


def create(serving: Serving) -> App:
    api = FastAPI(
        title="Potluck", version=potluck.__version__, root_path="", openapi_url=None, docs_url=None,
        redoc_url=None,
    )  # fmt: skip
    routes = _Routes(serving)
    routes.add_reads(api)
    routes.add_writes(api)
    openapi.add(api)
    _add_problems(api)
    return api


class _Routes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._key = Depends(_who)

    # Reads

    def add_reads(self, api: FastAPI) -> None:
        for what in _OPEN:
            self._add_open(api, what)
        for what in _OWNED:
            self._add_owned(api, what)
        self._add_accounts(api)
        self._add_receipts(api)
        self._add_events(api)

    def _add_accounts(self, api: FastAPI) -> None:
        key = self._key

        @api.get(PREFIX + "/accounts/{account}")
        async def account(
            account: Name, who: KeyRecord = key, min_offset: MinOffset = 0
        ) -> Response:
            rights.own(who, account)
            return await self._read("account", {"account": account}, min_offset)

        @api.get(PREFIX + "/whoami")
        async def whoami(who: KeyRecord = key) -> Response:
            found = await self._find_key(who.account, who.id)
            return _json(msgspec.json.encode(found))

    def _add_receipts(self, api: FastAPI) -> None:
        key = self._key

        @api.get(PREFIX + "/receipts")
        async def receipts(
            who: KeyRecord = key, account: Account = None, limit: Limit = 100,
            min_offset: MinOffset = 0,
        ) -> Response:  # fmt: skip
            args = {**rights.scope(who, account), "limit": str(limit)}
            return await self._read("receipts", args, min_offset)

        @api.get(PREFIX + "/receipts/{receipt}")
        async def receipt(
            receipt: Name, who: KeyRecord = key, min_offset: MinOffset = 0
        ) -> Response:
            args = {"receipt": receipt} | rights.mine(who)
            return await self._read("receipt", args, min_offset)

        @api.get(PREFIX + "/ledger")
        async def ledger(
            who: KeyRecord = key, account: Account = None, cause: Account = None,
            limit: Limit = 100, min_offset: MinOffset = 0,
        ) -> Response:  # fmt: skip
            args = {**rights.scope(who, account), "limit": str(limit)}
            if cause is not None:
                args["cause"] = cause
            return await self._read("ledger", args, min_offset)

    def _add_events(self, api: FastAPI) -> None:
        @api.get(PREFIX + "/events")
        async def events(
            who: KeyRecord = self._key, after: After = 0, limit: Limit = 100,
            follow: bool = False, wait_ms: Wait = 0,
        ) -> Response:  # fmt: skip
            rights.admin(who)
            if follow:
                return StreamingResponse(self._follow(after), media_type="text/event-stream")
            answer = await self._events(after, limit, wait_ms)
            return _through(answer)

    def _add_open(self, api: FastAPI, what: What) -> None:
        async def read(who: KeyRecord = self._key, min_offset: MinOffset = 0) -> Response:
            return await self._read(what, {}, min_offset)

        api.get(f"{PREFIX}/{what}", name=what)(read)

    def _add_owned(self, api: FastAPI, what: What) -> None:
        async def read(
            who: KeyRecord = self._key, account: Account = None, min_offset: MinOffset = 0
        ) -> Response:
            return await self._read(what, rights.scope(who, account), min_offset)

        api.get(f"{PREFIX}/{what}", name=what)(read)

    # Writes

    def add_writes(self, api: FastAPI) -> None:
        key = self._key

        @api.post(PREFIX + "/accounts", status_code=201)
        async def create_account(
            new: NewAccount, who: KeyRecord = key, once: Once = None
        ) -> Response:
            rights.admin(who)
            args = {"name": new.name, "kind": new.kind}
            command = _command(who, "create_account", once)
            return _through(await self._order("create_account", args, command), 201)

        @api.post(PREFIX + "/accounts/{account}/deposit")
        async def deposit(
            account: Name, new: NewDeposit, who: KeyRecord = key, once: Once = None
        ) -> Response:
            rights.admin(who)
            args = {"account": account, "amount_micro": str(new.amount_micro)}
            return _through(await self._order("deposit", args, _command(who, "deposit", once)))

        @api.post(PREFIX + "/keys", status_code=201)
        async def create_key(new: NewKey, who: KeyRecord = key) -> Response:
            account = new.account or who.account
            rights.own(who, account)
            if new.admin:
                rights.admin(who)
            return await self._create_key(new, account, rights.life_ms(who, new.life_s))

        @api.delete(PREFIX + "/keys/{revoked}")
        async def revoke_key(revoked: Name, who: KeyRecord = key) -> Response:
            if not who.admin:
                rights.revoke(who, await self._find_key(who.account, revoked))
            args = {"key": revoked} | rights.mine(who)
            return _through(await self._order("revoke_key", args))

    async def _create_key(self, new: NewKey, account: str, life_ms: int | None) -> Response:
        """The key is drawn here, and shown this once: only its hash travels, and is kept."""
        key = access.draw(self._serving.ids)
        digest = access.digest(key)
        args = {"account": account, "name": new.name, "admin": str(int(new.admin)), "hash": digest}
        if life_ms is not None:
            args["life_ms"] = str(life_ms)
        answer = await self._order("create_key", args)
        made = msgspec.json.decode(answer.data, type=views.KeyView)
        shown = views.CreatedKeyView(
            id=made.id,
            account=made.account,
            name=made.name,
            admin=made.admin,
            expires_ms=made.expires_ms,
            key=key,
        )
        return _json(msgspec.json.encode(shown), 201, {OFFSET_HEADER: str(answer.offset)})

    # Coordinators

    async def _read(self, what: What, args: dict[str, str], min_offset: int) -> Response:
        return _through(await self._ask(what, args, min_offset))

    async def _ask(self, what: What, args: dict[str, str], min_offset: int = 0) -> Answer:
        return _settled(await self._serving.query(what, args, min_offset))

    async def _order(
        self, order: Order, args: dict[str, str], command: str | None = None
    ) -> Answer:
        return _settled(await self._serving.command(order, args, command))

    async def _find_key(self, account: str, key: str) -> views.KeyView:
        answer = await self._ask("keys", {"account": account})
        return rights.find_key(answer.data, key)

    async def _events(self, after: int, limit: int, wait_ms: int) -> Answer:
        """Asks again until something happened, or `wait_ms` have passed."""
        clock = self._serving.clock
        ends_ms = clock.now_ms() + wait_ms
        while True:
            answer = await self._ask("events", {"after": str(after), "limit": str(limit)})
            left_ms = ends_ms - clock.now_ms()
            if left_ms <= 0 or self._serving.stopping or _events_in(answer):
                return answer
            await clock.sleep_ms(min(parameters.events_poll_ms, left_ms))

    async def _follow(self, after: int) -> AsyncIterator[bytes]:
        """Server-sent events, each with its offset as id; a comment while nothing happens."""
        offset = after
        while not self._serving.stopping:
            try:
                answer = await self._events(offset, 100, parameters.sse_comment_ms)
            except ProblemError as error:
                yield b"event: error\ndata: %b\n\n" % errors.document(error.problem)
                return
            events = _events_in(answer)
            for event in events:
                offset = event.offset
                yield b"id: %d\ndata: %b\n\n" % (offset, msgspec.json.encode(event))
            if not events:
                yield b": keep-alive\n\n"


async def _who(request: Request) -> KeyRecord:
    """Whom the gate has let in."""
    found: KeyRecord = request.state.key
    return found


def _command(who: KeyRecord, order: Order, once: str | None) -> str | None:
    """A write's own id, so that one key's words are no other's."""
    shown = rights.idempotency_key(once)
    if shown is None:
        return None
    return "cmd_" + hashlib.sha256(f"{who.id} {order} {shown}".encode()).hexdigest()


def _events_in(answer: Answer) -> list[views.EventView]:
    return msgspec.json.decode(answer.data, type=_Feed).data


def _settled(answer: Answer | None) -> Answer:
    if answer is None:
        raise ProblemError(Problem(Refusal.COORDINATOR_UNAVAILABLE))
    if answer.refusal:
        try:
            refusal = Refusal(answer.refusal)
        except ValueError:
            refusal = Refusal.INTERNAL
        raise ProblemError(Problem(refusal, answer.message))
    return answer


def _through(answer: Answer, status: int = 200) -> Response:
    return _json(answer.data, status, {OFFSET_HEADER: str(answer.offset)})


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _problem_response(problem: Problem) -> Response:
    headers = {name.decode(): value.decode() for name, value in errors.headers(problem)}
    return Response(errors.document(problem), errors.status(problem), headers)


def _add_problems(api: FastAPI) -> None:
    @api.exception_handler(ProblemError)
    async def refused(_request: Request, error: ProblemError) -> Response:
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
