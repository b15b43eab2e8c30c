"""Bad input against a running pool: clear errors with stable codes, and nobody is disturbed."""

import json
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.system.pools import RunningPool, until

ENDLESS = [{"role": "user", "content": "the the the the"}]
GOOD = {"model": "tiny-q8_0", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def said(**changed: object) -> bytes:
    return json.dumps({**GOOD, **changed}).encode()


BAD_BODIES = {
    "10 MB prompt": (said(messages=[{"role": "user", "content": "x" * 10_000_000}]), 413,
                     "body_too_large"),
    "deep JSON": (b'{"model":"tiny-q8_0","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400,
                  "invalid_request"),
    "no JSON": (b"hello", 400, "invalid_request"),
    "cut short": (said()[:-5], 400, "invalid_request"),
    "empty": (b"", 400, "invalid_request"),
    "an array": (b"[]", 400, "invalid_request"),
    "no UTF-8": (said().replace(b"Hi", b"\xff\xfe"), 400, "invalid_request"),
    "NaN": (said().replace(b"2}", b"NaN}"), 400, "invalid_request"),
    "wrong type": (said(messages="Hi"), 400, "invalid_request"),
    "wrong role": (said(messages=[{"role": "king", "content": "Hi"}]), 400, "invalid_request"),
    "no messages": (said(messages=[]), 400, "invalid_request"),
    "beyond the context": (said(messages=[{"role": "user", "content": "sea " * 9_000}]), 400,
                           "context_length_exceeded"),
    "unknown model": (said(model="nobody"), 404, "model_not_found"),
    "tools": (said(tools=[{"type": "function", "function": {"name": "f"}}]), 400,
              "unsupported_parameter"),
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(pool: RunningPool) -> Iterator[None]:
    """Streams run all the while, one after the other; each must end well."""
    stop = threading.Event()
    ends: list[str] = []

    def stream() -> None:
        body = {"model": "tiny-q8_0", "messages": ENDLESS, "temperature": 0, "stream": True}
        headers = {"authorization": f"Bearer {pool.api_key}"}
        while not stop.is_set():
            with httpx.stream(
                "POST", f"{pool.url}/v1/chat/completions", json=body, headers=headers, timeout=60
            ) as answer:
                text = answer.read().decode()
            ends.append("well" if text.endswith("data: [DONE]\n\n") else text[-300:])

    thread = threading.Thread(target=stream)
    thread.start()
    yield
    stop.set()
    thread.join(60)
    assert ends
    assert set(ends) == {"well"}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body(pool: RunningPool, undisturbed: None, name: str) -> None:
    body, status, code = BAD_BODIES[name]
    answer = pool.http.post("/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    assert answer.headers["x-request-id"]
    if status in (408, 409, 429) or status >= 500:
        assert "x-should-retry" in answer.headers


@pytest.mark.parametrize(
    ("header", "code"),
    [({}, "invalid_key"), ({"authorization": "Bearer nonsense"}, "invalid_key"),
     ({"authorization": "Bearer pk_" + "A" * 43}, "invalid_key")],
)  # fmt: skip
def test_nobodys_key(
    pool: RunningPool, undisturbed: None, header: dict[str, str], code: str
) -> None:
    for path in ("/v1/chat/completions", "/api/v1/keys"):
        answer = httpx.post(pool.url + path, content=said(), headers=header)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, code)


def test_no_funds(pool: RunningPool, undisturbed: None) -> None:
    made = pool.http.post("/api/v1/accounts", json={"name": "poor", "kind": "provider"})
    assert made.status_code == 201, made.text
    key = pool.http.post("/api/v1/keys", json={"name": "poor", "account": made.json()["id"]})
    assert key.status_code == 201, key.text
    answer = httpx.post(
        f"{pool.url}/v1/chat/completions",
        content=said(),
        headers={"authorization": f"Bearer {key.json()['key']}"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (402, "insufficient_funds")
    given = pool.http.post(
        f"/api/v1/accounts/{made.json()['id']}/deposit", json={"amount_micro": 100_000}
    )
    assert given.status_code == 200, given.text
    answer = httpx.post(
        f"{pool.url}/v1/chat/completions",
        content=said(),
        headers={"authorization": f"Bearer {key.json()['key']}"},
    )
    assert answer.status_code == 200


@pytest.fixture(scope="module")
def stranger(pool: RunningPool) -> Iterator[httpx.Client]:
    """With a key of an account of its own, which is no admin."""
    account = pool.http.post("/api/v1/accounts", json={"name": "stranger"}).json()["id"]
    key = pool.http.post("/api/v1/keys", json={"name": "s", "account": account}).json()["key"]
    with httpx.Client(base_url=pool.url, headers={"authorization": f"Bearer {key}"}) as client:
        client.headers["x-account"] = account
        yield client


def test_one_account_sees_nothing_of_another(pool: RunningPool, stranger: httpx.Client) -> None:
    answer = pool.http.post("/v1/chat/completions", content=said())
    receipt = answer.headers["x-potluck-receipt"]
    until(
        lambda: pool.http.get(f"/api/v1/receipts/{receipt}").status_code == 200, what="the receipt"
    )
    own = stranger.headers["x-account"]
    assert [one["id"] for one in stranger.get("/api/v1/accounts").json()["data"]] == [own]
    assert {one["account"] for one in stranger.get("/api/v1/keys").json()["data"]} == {own}
    for name in ("receipts", "holds"):
        assert stranger.get(f"/api/v1/{name}").json()["data"] == []
    lines = stranger.get("/api/v1/ledger").json()["data"]
    assert all(own in (line["payer"], line["payee"]) for line in lines)
    assert stranger.get("/api/v1/ledger", params={"cause": receipt}).json()["data"] == []
    assert stranger.get(f"/api/v1/receipts/{receipt}").status_code == 404
    for name in ("accounts", "keys", "receipts", "ledger", "holds"):
        asked = stranger.get(f"/api/v1/{name}", params={"account": pool.account})
        assert asked.status_code == 403, name
    assert stranger.get(f"/api/v1/accounts/{pool.account}").status_code == 403
    assert stranger.get("/api/v1/events").status_code == 403


def test_one_account_changes_nothing_of_another(pool: RunningPool, stranger: httpx.Client) -> None:
    owners = pool.get("/whoami")["id"]
    deposit = f"/api/v1/accounts/{stranger.headers['x-account']}/deposit"
    assert stranger.post(deposit, json={"amount_micro": 1}).status_code == 403
    assert stranger.post("/api/v1/accounts", json={"name": "x"}).status_code == 403
    assert stranger.post("/api/v1/keys", json={"name": "x", "admin": True}).status_code == 403
    taken = stranger.post("/api/v1/keys", json={"name": "x", "account": pool.account})
    assert taken.status_code == 403
    assert stranger.delete(f"/api/v1/keys/{owners}").status_code == 404
    assert pool.get("/whoami")["revoked_ms"] is None


@pytest.mark.parametrize("path", ["/v1/nothing", "/api/v1/nothing", "/api/v1/receipts/rcp_x"])
def test_a_page_that_is_not_there(pool: RunningPool, undisturbed: None, path: str) -> None:
    answer = pool.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"]


def test_noise_on_the_port(pool: RunningPool, undisturbed: None) -> None:
    host, port = pool.url.removeprefix("http://").split(":")
    for noise in (b"\x00" * 64, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"POST\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4_096):
                pass
    assert pool.ready()


def test_the_books_still_balance(pool: RunningPool, undisturbed: None) -> None:
    assert pool.get("/status")["books_balance"]
