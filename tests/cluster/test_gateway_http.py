"""The gateway's HTTP side on real sockets: uvicorn on loopback, a scripted pool behind it."""

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
import uvloop

from potluck.adapters.clock import SystemClock
from potluck.adapters.keys import Ed25519Signer
from potluck.core import parameters
from potluck.core.ids import gateway_id
from potluck.gateway.http import server
from potluck.gateway.serving.serving import Serving
from potluck.messages.queries import Answer
from potluck.messages.serving import Failed, Infer, KeepAlive
from potluck.simulator.ids import SeededIds
from potluck.simulator.network import Network
from tests.cluster import scripted_pool as script
from tests.cluster.scripted_pool import ADMIN_KEY, KEY, Coordinator, Node, chunk, done, good_day

SIGNER = Ed25519Signer(b"h" * 32)
ME = gateway_id(SIGNER.public_key)
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 64,
}


class Site:
    def __init__(self, http: httpx.AsyncClient, port: int, pool: Coordinator, node: Node) -> None:
        self.http, self.port, self.pool, self.node = http, port, pool, node
        self.serving: Serving

    async def chat(self, body: Any = None, key: str = KEY, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.post(CHAT, json=body or {**ASK, **fields}, headers=headers)

    async def raw(self, data: bytes, *, until: bytes = b"") -> bytes:
        """All that comes back on one connection, until it closes or `until` was seen."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        got = b""
        while not until or until not in got:
            part = await reader.read(65536)
            if not part:
                break
            got += part
        writer.close()
        return got


def serve(
    test: Callable[[Site], Awaitable[None]], node_script: script.Script = good_day,
    available_micro: int = 10_000_000,
) -> None:  # fmt: skip
    async def run() -> None:
        network = Network()
        pool = Coordinator(
            network.bus("co_1", privileged=True), [script.replica("node_A")], available_micro
        )
        await pool.start()
        node = Node(network.bus("node_A"), "node_A", node_script)
        await node.start()
        serving = Serving(
            pool=script.POOL, signer=SIGNER, bus=network.bus(ME), clock=SystemClock(),
            ids=SeededIds(random.Random(3)),
        )  # fmt: skip
        await serving.start()
        while not serving.ready:
            await asyncio.sleep(0.005)
        listening = server.listen("127.0.0.1", 0)
        port = listening.getsockname()[1]
        stop = asyncio.Event()
        running = asyncio.create_task(server.serve(serving, [listening], stop, grace_ms=500))
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                site = Site(http, port, pool, node)
                site.serving = serving
                await asyncio.wait_for(test(site), 20)
        finally:
            stop.set()
            await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def frames(text: str) -> list[Any]:
    return [
        json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]"
        for line in text.split("\n\n")
        if line.startswith("data: ")
    ]


def request(body: bytes, *more: bytes, key: str = KEY, path: bytes = CHAT.encode()) -> bytes:
    lines = [
        b"POST %b HTTP/1.1" % path, b"host: x", b"authorization: Bearer " + key.encode(),
        b"content-length: %d" % len(body), *more,
    ]  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def test_whole_answer() -> None:
    async def test(site: Site) -> None:
        response = await site.chat()
        assert response.status_code == 200
        answer = response.json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {
            "role": "assistant", "content": "Once upon a time", "refusal": None,
        }  # fmt: skip
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"] == {
            "prompt_tokens": 40, "completion_tokens": 8, "total_tokens": 48,
        }  # fmt: skip
        headers = response.headers
        request_id = headers["x-request-id"]
        assert headers["x-potluck-receipt"] == f"rcp_{request_id.removeprefix('req_')}_1"
        assert headers["x-potluck-node"] == "node_A"
        assert headers["x-potluck-cost-micro"] == "35"
        assert int(headers["openai-processing-ms"]) >= 0
        assert answer["system_fingerprint"] == "fp_" + script.DIGEST[:12]
        assert "date" in headers

    serve(test)


def test_streamed_answer() -> None:
    async def test(site: Site) -> None:
        response = await site.chat(stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        found = frames(response.text)
        assert found[-1] == "[DONE]"
        assert found[-2]["choices"] == []
        assert found[-2]["usage"]["total_tokens"] == 48
        assert found[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "role" not in found[1]["choices"][0]["delta"]
        assert found[-3]["choices"][0]["finish_reason"] == "stop"
        assert all(one["usage"] is None for one in found[:-2])
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in found[:-2])
        assert text == "Once upon a time"
        again = frames((await site.chat(stream=True)).text)
        assert all("usage" not in one for one in again[:-1])

    serve(test)


def test_sampling_and_parts_reach_the_node() -> None:
    async def test(site: Site) -> None:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        response = await site.chat(
            messages=[{"role": "developer", "content": "be brief"},
                      {"role": "user", "content": parts}],
            max_completion_tokens=9, temperature=0.5, top_p=0.9, stop="END", seed=-4,
            logprobs=True, top_logprobs=2, user="u", frobnicate={"a": [1]}, presence_penalty=0,
        )  # fmt: skip
        assert response.status_code == 200
        assert response.headers["x-potluck-ignored-fields"] == "frobnicate, presence_penalty"
        infer = site.node.infers[0]
        assert json.loads(infer.messages) == [
            {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"},
        ]  # fmt: skip
        sampling = infer.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.9)
        assert (sampling.stop, sampling.seed, sampling.top_logprobs) == (("END",), -4, 2)

    serve(test)


def test_logprobs_and_choices() -> None:
    entry = b'{"token":"a","logprob":-0.1,"bytes":[97],"top_logprobs":[]}'

    async def with_logprobs(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer), chunk(infer, 0, b"a", 1, entry))
        node.say(chunk(infer, 1, b"a", 1, entry), done(infer, 1, completion=2, reason="length"))

    async def test(site: Site) -> None:
        answer = (await site.chat(logprobs=True, n=2)).json()
        assert [one["index"] for one in answer["choices"]] == [0, 1]
        for choice in answer["choices"]:
            assert len(choice["logprobs"]["content"]) == 2
            assert choice["finish_reason"] == "length"
        response = await site.chat(logprobs=True, n=2, stream=True)
        assert len(response.headers["x-potluck-receipt"].split(", ")) == 2
        entries = [
            one
            for frame in frames(response.text)[:-1]
            for choice in frame["choices"]
            for one in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert len(entries) == 4

    serve(test, with_logprobs)


# ruff: noqa: E501
BAD: list[tuple[str, bytes, int, str, str | None]] = [
    ("not json", b"{", 400, "invalid_request", None),
    ("empty", b"", 400, "invalid_request", None),
    ("an array", b"[]", 400, "invalid_request", None),
    ("invalid utf-8", b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}', 400,
     "invalid_request", None),
    ("NaN", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400,
     "invalid_request", None),
    ("huge number", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
     400, "invalid_request", "temperature"),
    ("deep", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"x":' + b"[" * 5000 + b"]" * 5000 + b"}", 400,
     "invalid_request", None),
    ("33 deep", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"x":' + b"[" * 33
     + b"]" * 33 + b"}", 400, "invalid_request", None),
    ("no model", b'{"messages":[{"role":"user","content":"x"}]}', 400, "invalid_request", "model"),
    ("no messages", b'{"model":"tiny"}', 400, "invalid_request", "messages"),
    ("empty messages", b'{"model":"tiny","messages":[]}', 400, "invalid_request", "messages"),
    ("wrong type", b'{"model":"tiny","messages":[{"role":"user","content":7}]}', 400,
     "invalid_request", "messages[0].content"),
    ("wrong role", b'{"model":"tiny","messages":[{"role":"king","content":"x"}]}', 400,
     "invalid_request", "messages[0].role"),
    ("bool as int", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":true}',
     400, "invalid_request", "max_tokens"),
    ("negative", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":-1}', 400,
     "invalid_request", "max_tokens"),
    ("n", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"n":99}', 400,
     "invalid_request", "n"),
    ("hot", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":3}', 400,
     "invalid_request", "temperature"),
    ("stops", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stop":["a","b","c","d","e"]}',
     400, "invalid_request", "stop"),
    ("image", b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"image_url",'
     b'"image_url":{"url":"data:"}}]}]}', 400, "unsupported_parameter",
     "messages[0].content[0].type"),
    ("tools", b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]}',
     400, "unsupported_parameter", "tools"),
    ("unknown model", b'{"model":"gpt-9","messages":[{"role":"user","content":"x"}]}', 404,
     "model_not_found", "model"),
    ("too large", b'{"model":"' + b"x" * (10 << 20) + b'"}', 413, "body_too_large", None),
]  # fmt: skip


def test_bad_input_is_named() -> None:
    async def test(site: Site) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        for name, body, status, code, param in BAD:
            response = await site.http.post(CHAT, content=body, headers=headers)
            error = response.json()["error"]
            assert (name, response.status_code, error["code"]) == (name, status, code), error
            assert error["param"] == param, (name, error)
            assert error["message"]
            assert error["type"] == "invalid_request_error"
            assert response.headers["x-request-id"].startswith("req_")
        assert (await site.chat()).status_code == 200
        assert len(site.node.infers) == 1

    serve(test)


def test_a_chunked_body_is_bounded_too() -> None:
    async def endless() -> Any:
        for _ in range(200):
            yield b" " * 65536

    async def test(site: Site) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        response = await site.http.post(CHAT, content=endless(), headers=headers)
        assert response.status_code == 413

    serve(test)


def test_keys_and_funds() -> None:
    async def test(site: Site) -> None:
        unknown = await site.chat(key="pk_" + "z" * 43)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "invalid_key")
        assert (await site.http.post(CHAT, json=ASK)).status_code == 401
        site.pool.keys[script.sha("pk_" + "e" * 43)] = "expired_key"
        expired = await site.chat(key="pk_" + "e" * 43)
        assert expired.json()["error"]["code"] == "expired_key"
        poor = await site.chat(max_tokens=2000)
        assert (poor.status_code, poor.json()["error"]["code"]) == (402, "insufficient_funds")
        assert poor.headers["x-should-retry"] == "false"

    serve(test, available_micro=500)


def test_a_node_that_fails_before_and_after_the_first_token() -> None:
    async def fails(node: Node, infer: Infer) -> None:
        node.say(script.accepted(infer))
        if infer.sampling.seed == 1:
            node.say(chunk(infer, 0, b"Once"))
        await asyncio.sleep(0.02)
        node.say(Failed(infer.request, infer.attempt, "engine_failed", "it died"))

    async def test(site: Site) -> None:
        before = await site.chat(stream=True)
        assert (before.status_code, before.json()["error"]["code"]) == (502, "engine_failed")
        after = await site.chat(stream=True, seed=1)
        assert after.status_code == 200
        found = frames(after.text)
        assert found[0]["choices"][0]["delta"]["content"] == "Once"
        assert found[-1]["error"]["code"] == "engine_failed"

    serve(test, fails)


def test_pipelined_and_kept_alive_requests_are_answered_in_order() -> None:
    async def test(site: Site) -> None:
        streamed = json.dumps({**ASK, "stream": True}).encode()
        plain = json.dumps(ASK).encode()
        get = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
        last = request(plain, b"connection: close")
        got = await site.raw(request(streamed) + get + request(plain) + last)
        assert got.count(b"HTTP/1.1 200") == 4
        order = [
            got.index(b"[DONE]"), got.index(b'"status":"ok"'), got.index(b"chat.completion\""),
        ]  # fmt: skip
        assert order == sorted(order)
        assert got.count(b'"object":"chat.completion",') == 2
        old = request(plain).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        assert b"connection: close" in await site.raw(old)

    serve(test)


def test_bytes_that_trickle_in() -> None:
    async def test(site: Site) -> None:
        data = request(json.dumps(ASK).encode(), b"expect: 100-continue", b"connection: close")
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        for place in range(0, len(data), 17):
            writer.write(data[place : place + 17])
            await asyncio.sleep(0.001)
        got = await reader.read()
        assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
        writer.close()

    serve(test)


async def endless(node: Node, infer: Infer) -> None:
    node.say(script.accepted(infer))
    seq = 0
    while not node.cancels:
        if seq - node.last_ack() <= 32:
            node.say(chunk(infer, seq, b"y" * 1500, 0))
            seq += 1
            await asyncio.sleep(0.0005)
        else:
            node.say(KeepAlive(infer.request, infer.attempt))
            await asyncio.sleep(0.02)


def test_a_client_that_leaves_stops_the_node() -> None:
    async def test(site: Site) -> None:
        body = json.dumps({**ASK, "stream": True}).encode()
        await site.raw(request(body), until=b"yyy")
        while not site.node.cancels:
            await asyncio.sleep(0.005)
        assert site.node.cancels[0].acked_seq >= 0
        assert site.serving.limits.in_flight == 0

    serve(test, endless)


def test_a_client_that_does_not_read_costs_little_memory() -> None:
    async def test(site: Site) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", site.port))
        await loop.sock_sendall(sock, request(json.dumps({**ASK, "stream": True}).encode()))
        sent = -1
        while site.node.last_ack() != sent or sent < 0:
            sent = site.node.last_ack()
            await asyncio.sleep(0.5)
        life = next(iter(site.serving.conversations.completions())).lives[0]
        assert life.pending_bytes <= parameters.window_bytes
        assert not site.node.cancels
        sock.close()
        while not site.node.cancels:
            await asyncio.sleep(0.005)

    serve(test, endless)


def test_other_paths_and_methods() -> None:
    async def test(site: Site) -> None:
        http, headers = site.http, {"authorization": f"Bearer {KEY}"}
        assert (await http.get(CHAT)).status_code == 405
        assert (await http.options(CHAT)).status_code == 204
        assert (await http.get("/nowhere")).json()["error"]["code"] == "not_found"
        assert (await http.post("/healthz")).status_code == 405
        assert (await http.head("/healthz")).status_code == 200
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        listed = (await http.get("/v1/models", headers=headers)).json()
        assert [one["id"] for one in listed["data"]] == ["tiny"]
        assert (await http.get("/v1/models/tiny", headers=headers)).json()["object"] == "model"
        assert (await http.get("/v1/models/none", headers=headers)).status_code == 404
        assert b"400 Bad Request" in await site.raw(b"NONSENSE\r\n\r\n")
        upgrade = request(b"{}", b"connection: upgrade", b"upgrade: websocket")
        assert b"400" in (await site.raw(upgrade, until=b"}"))[:20]
        site.pool.away = True
        unready = await http.get("/readyz")
        assert (unready.status_code, unready.json()["error"]["code"]) == (
            503, "coordinator_unavailable",
        )  # fmt: skip

    serve(test)


def test_native_api() -> None:
    async def test(site: Site) -> None:
        http, mine = site.http, {"authorization": f"Bearer {KEY}"}
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        site.pool.answers["status"] = Answer("", 41, b'{"pool":"home"}')
        site.pool.answers["receipt"] = Answer("", 41, b'{"id":"rcp_1"}')
        site.pool.answers["nodes"] = Answer("node_not_found", 41, b"", "no such node")
        status = await http.get("/api/v1/status", headers=mine)
        assert status.json() == {"pool": "home"}
        assert status.headers["x-potluck-offset"] == "41"
        assert (await http.get("/api/v1/status")).status_code == 401
        for headers, args in ((mine, {"account": "acc_alice"}), (admin, {})):
            assert (await http.get("/api/v1/receipts/rcp_1", headers=headers)).is_success
            asked = site.pool.of("query")[-1]
            assert asked.args == {"receipt": "rcp_1"} | args  # type: ignore[attr-defined]
        missing = await http.get("/api/v1/nodes", headers=mine)
        assert missing.json()["error"]["message"] == "no such node"
        others = await http.get("/api/v1/ledger?account=acc_bob", headers=mine)
        assert others.json()["error"]["code"] == "forbidden"
        assert (await http.get("/api/v1/events", headers=mine)).status_code == 403
        deposit = "/api/v1/accounts/acc_alice/deposit"
        body = {"amount_micro": 5}
        assert (await http.post(deposit, json=body, headers=mine)).status_code == 403
        assert (await http.post(deposit, json=body, headers=admin)).status_code == 200
        made = await http.post("/api/v1/keys", json={"name": "k", "life_s": 60}, headers=mine)
        assert made.status_code == 201
        command = site.pool.of("command")[-1]
        expires_ms = int(command.args.pop("expires_ms"))  # type: ignore[attr-defined]
        assert abs(expires_ms - SystemClock().wall_ms() - 60_000) < 30_000
        assert command.args == {  # type: ignore[attr-defined]
            "account": "acc_alice", "name": "k", "admin": "0",
        }  # fmt: skip
        greedy = {"name": "k", "admin": True}
        assert (await http.post("/api/v1/keys", json=greedy, headers=mine)).status_code == 403
        listed = (await http.get("/api/v1/receipts?limit=5&min_offset=9", headers=mine)).status_code
        assert listed == 200
        query = site.pool.of("query")[-1]
        assert query.args == {"account": "acc_alice", "limit": "5"}  # type: ignore[attr-defined]
        assert query.at_least_offset == 9  # type: ignore[attr-defined]
        bad = await http.get("/api/v1/receipts?limit=x", headers=mine)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "limit")
        assert (await http.get("/api/v1/nowhere", headers=mine)).json()["error"]["code"]
        assert (await http.put("/api/v1/keys", headers=mine)).status_code == 405

    serve(test)


def test_openapi_and_its_reader_come_from_this_machine() -> None:
    async def test(site: Site) -> None:
        document = (await site.http.get("/api/v1/openapi.json")).json()
        assert "ReceiptView" in document["components"]["schemas"]
        paths = document["paths"]
        shown = paths["/api/v1/receipts/{receipt}"]["get"]["responses"]["200"]["content"]
        assert shown["application/json"]["schema"]["$ref"].endswith("/ReceiptView")
        page = (await site.http.get("/api/v1/docs")).text
        assert "cdn" not in page
        assert "http://" not in page
        assert "https://" not in page
        script_file = await site.http.get("/api/v1/docs/files/swagger-ui-bundle.js")
        assert script_file.status_code == 200

    serve(test)


def test_events_as_a_stream() -> None:
    async def test(site: Site) -> None:
        event = {"offset": 7, "at_ms": 1, "kind": "k", "subject": "s", "data": {"a": 1}}
        data = msgspec.json.encode({"data": [event], "offset": 7, "object": "list"})
        site.pool.answers["events"] = Answer("", 7, data)
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with site.http.stream(
            "GET", "/api/v1/events?follow=true&after=6", headers=headers
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    assert json.loads(line[6:]) == event
                    break

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
def test_many_at_once(stream: bool) -> None:
    async def test(site: Site) -> None:
        responses = await asyncio.gather(*[site.chat(stream=stream) for _ in range(60)])
        assert {response.status_code for response in responses} == {200}
        assert len({response.headers["x-potluck-receipt"] for response in responses}) == 60

    serve(test)
