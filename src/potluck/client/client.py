"""A pool over HTTP: `/api/v1` as typed views, and chat as a stream of text.

For programs written for OpenAI, use their own client with `base_url=<url>/v1`; this one shows what
that API has no words for: nodes, money, receipts.
"""

import re
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import httpx
import msgspec

from potluck.core.refusals import Refusal
from potluck.messages import views

ViewT = TypeVar("ViewT")
_TIMEOUT_S = 30.0
_STREAM_SILENCE_S = 120.0


class PotluckError(Exception):
    """The pool refused or could not be reached; `code` is stable (core/refusals)."""

    def __init__(self, message: str, code: str, status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Answer:
    """A chat's text as it comes; the rest is known once it has ended."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.receipt: str = response.headers.get("x-potluck-receipt", "")
        self.node: str = response.headers.get("x-potluck-node", "")
        self.usage: dict[str, Any] = {}
        self.finish_reason: str = ""

    def __iter__(self) -> Iterator[str]:
        """Raises `PotluckError` if the stream ends with an error frame, or without its end."""
        for line in self._response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return
            frame = msgspec.json.decode(line[6:])
            if "error" in frame:
                raise _refused(frame, self._response.status_code)
            self.usage = frame.get("usage") or self.usage
            for choice in frame["choices"]:
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                if text := choice["delta"].get("content"):
                    yield text
        raise PotluckError("the answer broke off", Refusal.STREAM_BROKEN)


class Client:
    """Not for two threads. Every method raises `PotluckError`."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = {"authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def status(self) -> views.StatusView:
        return self._get("/status", views.StatusView)

    def whoami(self) -> views.KeyView:
        return self._get("/whoami", views.KeyView)

    def nodes(self) -> list[views.NodeView]:
        return self._get("/nodes", views.Page[views.NodeView]).data

    def models(self) -> list[views.ModelView]:
        return self._get("/models", views.Page[views.ModelView]).data

    def account(self, account: str) -> views.AccountView:
        return self._get(f"/accounts/{account}", views.AccountView)

    def accounts(self) -> list[views.AccountView]:
        return self._get("/accounts", views.Page[views.AccountView]).data

    def holds(self) -> list[views.HoldView]:
        return self._get("/holds", views.Page[views.HoldView]).data

    def keys(self) -> list[views.KeyView]:
        return self._get("/keys", views.Page[views.KeyView]).data

    def create_key(
        self, name: str, *, account: str | None = None, life_s: int | None = None
    ) -> views.CreatedKeyView:
        body = {"name": name, "account": account, "life_s": life_s}
        return self._send("POST", "/keys", body, views.CreatedKeyView)

    def revoke_key(self, key: str) -> views.KeyView:
        return self._send("DELETE", f"/keys/{key}", None, views.KeyView)

    def receipt(self, receipt: str) -> views.ReceiptView:
        return self._get(f"/receipts/{receipt}", views.ReceiptView)

    def receipts(self, limit: int = 20) -> list[views.ReceiptLineView]:
        page = views.Page[views.ReceiptLineView]
        return self._get("/receipts", page, {"limit": limit}).data

    def ledger(self, *, cause: str | None = None, limit: int = 20) -> list[views.TransferView]:
        arguments = {"limit": limit} | ({"cause": cause} if cause else {})
        return self._get("/ledger", views.Page[views.TransferView], arguments).data

    def chat(self, request: Mapping[str, Any]) -> "ChatStream":
        """`request` as for `/v1/chat/completions`; it is always streamed, with usage."""
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        return ChatStream(self._http, body)

    def _get(
        self, path: str, view: type[ViewT], arguments: Mapping[str, Any] | None = None
    ) -> ViewT:
        return _decoded(self._call("GET", path, params=arguments), view)

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, view: type[ViewT]
    ) -> ViewT:
        return _decoded(self._call(method, path, json=body), view)

    def _call(self, method: str, path: str, **rest: Any) -> httpx.Response:
        try:
            return self._http.request(method, f"/api/v1{path}", **rest)
        except httpx.HTTPError as error:
            raise _unreachable(self._http, error) from error


class ChatStream:
    """`with client.chat(…) as answer: for text in answer: …`; leaving early cancels."""

    def __init__(self, http: httpx.Client, body: Mapping[str, Any]) -> None:
        self._http = http
        self._body = body
        self._response: httpx.Response | None = None

    def __enter__(self) -> Answer:
        request = self._http.build_request(
            "POST", "/v1/chat/completions", json=self._body, timeout=_STREAM_SILENCE_S
        )
        try:
            response = self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unreachable(self._http, error) from error
        if response.status_code != 200:
            response.read()
            raise _refused_response(response)
        self._response = response
        return Answer(response)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._response is not None:
            self._response.close()
        if isinstance(error, httpx.HTTPError):
            raise PotluckError(f"the answer broke off: {error}", Refusal.STREAM_BROKEN) from error


def _decoded(response: httpx.Response, view: type[ViewT]) -> ViewT:
    if response.status_code >= 400:
        raise _refused_response(response)
    return msgspec.json.decode(response.content, type=view)


def _refused_response(response: httpx.Response) -> PotluckError:
    try:
        return _refused(msgspec.json.decode(response.content), response.status_code)
    except (msgspec.MsgspecError, KeyError, TypeError):
        # A pool says why; this is something else, or something between it and us.
        text = f"{response.url} answered {response.status_code}, and not as a pool does"
        fault = Refusal.INTERNAL if response.status_code >= 500 else Refusal.NOT_FOUND
        return PotluckError(text, fault, response.status_code)


def _refused(frame: Any, status: int) -> PotluckError:
    error = frame["error"]
    message, param = error["message"], error.get("param")
    if param and not re.search(rf"\b{re.escape(param)}\b", message):
        message = f"{param}: {message}"
    return PotluckError(message, error.get("code") or Refusal.INTERNAL, status)


def _unreachable(http: httpx.Client, error: httpx.HTTPError) -> PotluckError:
    return PotluckError(f"{http.base_url} does not answer: {error}", "unreachable")
