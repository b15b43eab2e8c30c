"""Requesters: they ask, read, dawdle, leave, and know what the right answer is."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from potluck.core.ids import RequestId
from potluck.core.refusals import Refusal
from potluck.gateway.serving.asks import ChatAsk
from potluck.gateway.serving.requests import Completion
from potluck.gateway.serving.serving import Serving
from potluck.messages.queries import KeyRecord
from potluck.messages.serving import Sampling
from potluck.ports.clock import Clock
from potluck.simulator import engine

MODEL = "imagined"


@dataclass(slots=True)
class Story:
    """What a requester saw of one request."""

    requests: list[RequestId] = field(default_factory=list)
    expected: bytes = b""
    text: str = ""
    outcome: str = "asked"
    """`refused`, `gateway_died`, `left`, `finished`, or the code of an error frame."""


class Reader:
    """Wakes its task when there is something to read, as the HTTP side does."""

    def __init__(self) -> None:
        self.news = asyncio.Event()

    def wake(self) -> None:
        self.news.set()

    def quiet(self) -> None:
        pass

    def broken(self) -> None:
        raise AssertionError("an answer could not be written")


class Requester:
    def __init__(
        self, *, name: str, key_hash: str, rng: random.Random, clock: Clock,
        gateway: Callable[[], Serving | None], stories: list[Story],
    ) -> None:  # fmt: skip
        self._name = name
        self._key_hash = key_hash
        self._rng = rng
        self._clock = clock
        self._gateway = gateway
        self._stories = stories
        self._asked = 0

    async def run(self, count: int) -> None:
        for _ in range(count):
            await self._clock.sleep_ms(self._rng.randint(0, 3_000))
            story = Story()
            self._stories.append(story)
            await self._ask(story)

    async def _ask(self, story: Story) -> None:
        gateway = self._gateway()
        if gateway is None:
            story.outcome = "gateway_died"
            return
        self._asked += 1
        content = f"{self._name} asks {self._asked}" + "x" * self._rng.randint(0, 40)
        messages = json.dumps([{"role": "user", "content": content}]).encode()
        tokens = self._rng.choice((1, 8, 60, 300))
        story.expected = b"".join(engine.token(messages, index)[1] for index in range(tokens))
        ask = ChatAsk(
            model=MODEL, messages=messages, max_tokens=tokens,
            sampling=Sampling(max_tokens=tokens), stream=self._rng.random() < 0.7,
        )  # fmt: skip
        key = gateway.key_cached(self._key_hash) or await gateway.keys.find(self._key_hash)
        if not isinstance(key, KeyRecord):
            story.outcome = "refused"
            return
        reader = Reader()
        completion = await gateway.submit(ask, key, reader)
        if isinstance(completion, Refusal):
            story.outcome = "refused"
            return
        story.requests = [life.request for life in completion.lives]
        await self._read(gateway, completion, reader, story)

    async def _read(
        self, gateway: Serving, completion: Completion, reader: Reader, story: Story
    ) -> None:
        patience = self._rng.choice((None, None, None, 1, 5))
        slow_ms = self._rng.choice((0, 0, 0, 50, 2_000))
        reads, text = 0, ""
        while True:
            if self._gateway() is not gateway:
                story.outcome = "gateway_died"
                return
            if not await self._news(reader):
                continue
            for piece in completion.drain():
                text += piece.text
                if piece.finish is not None:
                    story.outcome = "finished"
            if completion.ask.stream or (completion.ended and completion.failure is None):
                story.text = text  # An answer that is not streamed is shown as a whole, or not.
            if completion.ended:
                if completion.failure is not None:
                    story.outcome = completion.failure.refusal
                return
            reads += 1
            if patience is not None and reads > patience:
                # Something it has not read yet waits for it when it leaves.
                await self._clock.sleep_ms(self._rng.randint(0, 200))
                completion.cancel()
                story.outcome = "left"
                return
            await self._clock.sleep_ms(slow_ms)

    async def _news(self, reader: Reader) -> bool:
        """False: look around; the gateway may have died without a word."""
        try:
            async with asyncio.timeout(0.5):
                await reader.news.wait()
        except TimeoutError:
            return False
        reader.news.clear()
        return True
