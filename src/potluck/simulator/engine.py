"""An engine without a model: deterministic tokens as a function of prompt and position.

It keeps the loop's time, so it runs on virtual clocks; it has slots, a context limit and logprobs,
and can be killed.
"""

import asyncio
import json
import math
import zlib
from collections.abc import AsyncIterator

from potluck.core.ids import Digest
from potluck.core.refusals import Refusal
from potluck.ports.runtime import Ask, EngineError, Finish, ModelSpec, Piece, Prefilled

_WORDS = ("pot", "luck", "shares", "what", "each", "kitchen", "bröt", "鍋", "and", "serves", "all")
FAKE_DIGEST = Digest("f" * 64)


def token(messages: bytes, index: int) -> tuple[int, bytes]:
    """(id, bytes) of the answer's token number `index`."""
    number = zlib.crc32(messages + index.to_bytes(4, "big"))
    return number % 32_000, (_WORDS[number % len(_WORDS)] + " ").encode()


def prompt_tokens(messages: bytes) -> int:
    return max(1, len(messages) // 4)


class FakeEngine:
    def __init__(
        self, spec: ModelSpec, *, prefill_ms: int, token_ms: int, end_every: int, tier: str
    ) -> None:
        self.spec = spec
        self.digest = FAKE_DIGEST
        self.tier = tier
        self.alive = True
        self.running = 0
        """Answers being generated now."""
        self.generated = 0
        self.closed_early = 0
        self._prefill_ms = prefill_ms
        self._token_ms = token_ms
        self._end_every = end_every

    async def generate(self, ask: Ask) -> AsyncIterator[Piece | Prefilled | Finish]:
        prompt = prompt_tokens(ask.messages)
        if prompt >= self.spec.context_tokens:
            raise EngineError(
                Refusal.CONTEXT_LENGTH_EXCEEDED,
                f"{prompt} tokens, and the context has {self.spec.context_tokens}",
            )
        self._must_live()
        assert self.running < self.spec.slots, "asked beyond its slots"
        self.running += 1
        finished = False
        try:
            await asyncio.sleep(self._prefill_ms / 1000)
            self._must_live()
            yield Prefilled(prompt)
            most = min(ask.max_tokens, self.spec.context_tokens - prompt)
            made = 0
            reason = "length"
            text = b""
            while made < most:
                await asyncio.sleep(self._token_ms / 1000)
                self._must_live()
                number, data = token(ask.messages, made)
                made += 1
                self.generated += 1
                text += data
                if (self._end_every and number % self._end_every == 0) or any(
                    one.encode() in text for one in ask.stop
                ):
                    reason = "stop"
                    yield Piece((number,), b"", _logprobs(number, b"", ask))
                    break
                yield Piece((number,), data, _logprobs(number, data, ask))
            finished = True
            yield Finish(
                reason=reason, prompt_tokens=prompt, completion_tokens=made,
                prefill_ms=self._prefill_ms, decode_ms=made * self._token_ms,
            )  # fmt: skip
        finally:
            self.running -= 1
            if not finished:
                self.closed_early += 1

    def die(self) -> None:
        """As if its process were killed: what runs fails at its next token."""
        self.alive = False

    async def stop(self) -> None:
        self.alive = False

    def _must_live(self) -> None:
        if not self.alive:
            raise EngineError(Refusal.ENGINE_FAILED, "the engine is gone")


class FakeRuntime:
    """`ports.runtime.Runtime`. `failures`: so many starts fail first.

    `end_every`: about one token in so many ends the answer by itself; 0: only limits and stops do.
    """

    def __init__(
        self, *, start_ms: int = 300, prefill_ms: int = 20, token_ms: int = 10, failures: int = 0,
        end_every: int = 0, tier: str = "full",
    ) -> None:  # fmt: skip
        self.engines: list[FakeEngine] = []
        self.failures = failures
        self._start_ms = start_ms
        self._prefill_ms = prefill_ms
        self._token_ms = token_ms
        self._end_every = end_every
        self._tier = tier

    async def start(self, spec: ModelSpec) -> FakeEngine:
        await asyncio.sleep(self._start_ms / 1000)
        if self.failures:
            self.failures -= 1
            raise EngineError(Refusal.ENGINE_FAILED, "the engine did not start")
        engine = FakeEngine(
            spec,
            prefill_ms=self._prefill_ms,
            token_ms=self._token_ms,
            end_every=self._end_every,
            tier=self._tier,
        )
        self.engines.append(engine)
        return engine


def _logprobs(number: int, data: bytes, ask: Ask) -> bytes:
    """OpenAI's entry for one token; the alternatives are this token under other names."""
    if ask.top_logprobs is None:
        return b""
    entry = {"token": data.decode(), "logprob": -math.log(2), "bytes": list(data)}
    others = [{**entry, "logprob": -math.log(2) - at} for at in range(ask.top_logprobs)]
    assert number >= 0
    return json.dumps({**entry, "top_logprobs": others}, separators=(",", ":")).encode()
