"""What every runtime keeps: one suite for the engine without a model and for llama.cpp."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from potluck.adapters.clock import SystemClock
from potluck.adapters.processes import LocalProcesses
from potluck.agent.runtimes import llama_cpp
from potluck.agent.sandboxes import bubblewrap, tier
from potluck.core.ids import Digest
from potluck.core.refusals import Refusal
from potluck.ports.runtime import (
    Ask,
    Engine,
    EngineError,
    Finish,
    ModelSpec,
    Piece,
    Prefilled,
    Runtime,
)
from potluck.simulator.engine import FakeRuntime

MODEL = Path(__file__).parents[1] / "data" / "tiny-q8_0.gguf"
ASK = Ask(
    messages=b'[{"role":"user","content":"In the beginning"}]', max_tokens=12, temperature=0.0,
    top_p=None, stop=(), seed=1, top_logprobs=None,
)  # fmt: skip
Test = Callable[[Engine], Awaitable[None]]


def _missing() -> str:
    try:
        llama_cpp.find()
        found, reason = tier.probe(LocalProcesses())
    except bubblewrap.SandboxError as error:
        return str(error)
    return reason if found == "none" else ""


@pytest.fixture(params=["fake", "llama_cpp"])
def with_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Test], None]:
    if request.param == "llama_cpp" and (reason := _missing()):
        pytest.skip(reason)

    async def run(test: Test) -> None:
        runtime: Runtime = FakeRuntime(start_ms=1, prefill_ms=1, token_ms=1)
        if request.param == "llama_cpp":
            runtime = llama_cpp.LlamaCpp(
                processes=LocalProcesses(), clock=SystemClock(), node="node_test", data=tmp_path
            )
        spec = ModelSpec(
            name="tiny", digest=Digest("ab" * 32), path=MODEL, context_tokens=128, slots=2,
            threads=1, memory_bytes=512 << 20,
        )  # fmt: skip
        engine = await runtime.start(spec)
        try:
            await test(engine)
        finally:
            await engine.stop()
        assert not engine.alive

    def on_its_loop(test: Test) -> None:
        # As the processes of a pool run it: llama.cpp on uvloop.
        factory = uvloop.new_event_loop if request.param == "llama_cpp" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run(test))

    return on_its_loop


async def collect(engine: Engine, ask: Ask) -> list[Piece | Prefilled | Finish]:
    return [item async for item in engine.generate(ask)]


def test_prompt_then_pieces_then_the_count(with_engine: Callable[[Test], None]) -> None:
    async def test(engine: Engine) -> None:
        assert engine.alive
        assert len(engine.digest) == 64
        items = await collect(engine, ASK)
        assert isinstance(items[0], Prefilled)
        assert isinstance(items[-1], Finish)
        pieces = [item for item in items if isinstance(item, Piece)]
        assert len(pieces) == len(items) - 2
        finish = items[-1]
        assert finish.prompt_tokens == items[0].prompt_tokens > 0
        assert finish.completion_tokens == sum(len(one.token_ids) for one in pieces)
        assert finish.completion_tokens <= 12
        assert finish.reason in ("stop", "length")
        assert b"".join(one.data for one in pieces).decode()

    with_engine(test)


def test_greedy_answers_are_alike_also_side_by_side(with_engine: Callable[[Test], None]) -> None:
    async def test(engine: Engine) -> None:
        first, second, third = [
            await collect(engine, ASK),
            *await asyncio.gather(collect(engine, ASK), collect(engine, ASK)),
        ]
        # Words read together are one piece: where they are cut is the socket's affair.
        answers = []
        for items in (first, second, third):
            pieces = [one for one in items if isinstance(one, Piece)]
            tokens = [token for one in pieces for token in one.token_ids]
            answers.append((b"".join(one.data for one in pieces), tokens))
        assert answers[0] == answers[1] == answers[2]

    with_engine(test)


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_are_openais(with_engine: Callable[[Test], None], top: int) -> None:
    async def test(engine: Engine) -> None:
        items = await collect(engine, replace(ASK, top_logprobs=top))
        for piece in items:
            if isinstance(piece, Piece) and piece.data:
                entries = json.loads(b"[" + piece.logprobs + b"]")
                assert len(entries) == len(piece.token_ids)
                for entry in entries:
                    assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
                    assert len(entry["top_logprobs"]) == top
                    assert entry["logprob"] <= 0
                assert b"".join(bytes(entry["bytes"]) for entry in entries) == piece.data

    with_engine(test)


def test_too_long_a_prompt_is_refused(with_engine: Callable[[Test], None]) -> None:
    async def test(engine: Engine) -> None:
        messages = json.dumps([{"role": "user", "content": "hello " * 900}]).encode()
        with pytest.raises(EngineError) as caught:
            await collect(engine, replace(ASK, messages=messages))
        assert caught.value.refusal == Refusal.CONTEXT_LENGTH_EXCEEDED
        assert len(await collect(engine, ASK)) > 2

    with_engine(test)


def test_closing_frees_the_slot(with_engine: Callable[[Test], None]) -> None:
    async def test(engine: Engine) -> None:
        for _ in range(6):
            async with aclosing(engine.generate(replace(ASK, max_tokens=100))) as answer:
                async for item in answer:
                    if isinstance(item, Piece):
                        break
        assert isinstance((await collect(engine, ASK))[-1], Finish)

    with_engine(test)
