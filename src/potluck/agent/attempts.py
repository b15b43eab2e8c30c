"""One attempt's life: accepted, waiting, streaming, ended, closed. docs/protocol/serving.md.

Rule: paid is what the gateway acknowledged. The engine runs only while somebody may still read it.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from potluck.agent import billing
from potluck.agent.deployments import Replica
from potluck.agent.frames import Outgoing
from potluck.agent.journal import Begun, Ended, Gone, Journal, Progress
from potluck.agent.receipts import Receipts
from potluck.agent.tasks import Tasks
from potluck.core import parameters
from potluck.core.delivery import Outbound
from potluck.core.ids import Digest, GatewayId, NodeId, RequestId
from potluck.core.refusals import Refusal
from potluck.messages.serving import (
    Accepted,
    Chunk,
    Done,
    Failed,
    FinishReason,
    Infer,
    KeepAlive,
    ToGateway,
)
from potluck.ports.clock import Clock
from potluck.ports.runtime import Ask, Engine, EngineError, Finish, Piece, Prefilled

log = logging.getLogger(__name__)
Key = tuple[RequestId, int]
_CHUNK_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What every attempt needs of its node."""

    node: NodeId
    tier: str
    clock: Clock
    tasks: Tasks
    outgoing: Outgoing
    journal: Journal
    receipts: Receipts
    counters: "Counter[str]"


class Attempt:
    """Changed in place: every token meets it."""

    def __init__(
        self, infer: Infer, gateway: GatewayId, world: World, closed: Callable[["Attempt"], None]
    ) -> None:
        self.gateway = gateway
        self.infer = infer
        self.key: Key = (infer.request, infer.attempt)
        self.end: Done | Failed | None = None
        self._world = world
        self._closed = closed
        self._out: Outbound[Chunk] = Outbound()
        self._output_hash = hashlib.sha256()
        self._receipt = billing.blank(infer, gateway, world.node, world.tier)
        self._prompt_tokens = 0
        self._finish: Finish | None = None
        self._pieces: list[Piece] = []
        self._pieces_bytes = 0
        self._at_tick = False
        """Asked to write a chunk at the next tick."""
        now_ms = world.clock.now_ms()
        self._begun_ms = now_ms
        self._engine_begun_ms: int | None = None
        self._first_token = False
        self._heard_ms = now_ms
        self._said_ms = now_ms
        self._chunk_said_ms = 0
        self._waiting_since_ms = now_ms
        self._room = asyncio.Event()
        self._end_rode_alone = False
        """The last chunk may have come without `Done`: to acknowledge it is not to have both."""
        self._is_closed = False
        self._under_way = False
        self._task: asyncio.Task[None] | None = None

    def begin(self, replica: Replica) -> None:
        try:
            self._world.journal.begin(Begun(self._receipt))
        except OSError as error:
            self._world.counters["journal_errors"] += 1
            log.error("journal: %s", error)
            self.refuse(Refusal.STORE_FULL, "the node's disk is full")
            return
        self._world.outgoing.attempts += 1
        self._under_way = True
        self.accept(replica.queue_depth)
        replica.asked += 1
        self._task = self._world.tasks.start(self._run(replica))
        self._task.add_done_callback(lambda _task: replica.leave())

    def accept(self, queue_depth: int) -> None:
        self._say_soon(Accepted(*self.key, queue_depth))

    def refuse(self, refusal: Refusal, message: str) -> None:
        """Nothing was begun, so nothing is owed and no receipt is written."""
        self.end = Failed(*self.key, refusal, message)
        self._say(self.end)
        self._close()

    def again(self) -> None:
        """The order came once more: all that is unacknowledged is said once more."""
        self._heard_ms = self._world.clock.now_ms()
        self.accept(0)
        for chunk in self._out.again(0):
            self._say(chunk)
        if self.end is not None:
            self._say(self.end)

    def acknowledge(self, seq: int) -> None:
        self._heard_ms = self._world.clock.now_ms()
        handed_on = [
            (tokens, chunk.data) for at, _, tokens, chunk in self._out.pending if at <= seq
        ]
        if not self._out.acknowledge(seq):
            self._world.counters["acknowledged_unsent"] += 1
            return
        if handed_on:
            data = b"".join(part for _, part in handed_on)
            self._output_hash.update(data)
            tokens = sum(count for count, _ in handed_on)
            self._world.journal.append(
                Progress(self._receipt.receipt, self._prompt_tokens, tokens, data)
            )
        if not self._out.full:
            self._room.set()
        if self.end is not None and not self._out.pending and seq == self._last_seq:
            if handed_on and self._end_rode_alone:
                asyncio.get_running_loop().call_later(
                    parameters.attempt_repeat_ms / 1000, self._say, self.end
                )
            self._finalise(self._outcome_of_end())

    def resend(self, from_seq: int) -> None:
        self._heard_ms = self._world.clock.now_ms()
        self._end_rode_alone = True
        for chunk in self._out.again(from_seq):
            self._say(chunk)
        if self.end is not None:
            self._say(self.end)

    def cancel(self, acked_seq: int) -> None:
        if acked_seq >= 0:
            self.acknowledge(min(acked_seq, self._last_seq))
        if not self._is_closed:
            self._finalise("failed" if isinstance(self.end, Failed) else "cancelled")

    def watch(self, now_ms: int) -> None:
        """Called every `attempts_watch_ms`."""
        owed = bool(self._out.pending) or self.end is not None
        silent_ms = now_ms - max(self._heard_ms, self._waiting_since_ms)
        if owed and silent_ms >= parameters.acknowledgement_silence_ms:
            self._world.counters["abandoned"] += 1
            self._finalise("failed" if isinstance(self.end, Failed) else "abandoned")
            return
        if self.end is None:
            self._watch_deadlines(now_ms)
        if self._is_closed:
            return
        if self._pieces and now_ms - self._chunk_said_ms >= parameters.unstreamed_tick_ms:
            self._flush()
        if now_ms - self._said_ms >= parameters.keepalive_ms - parameters.attempts_watch_ms:
            self._say_soon(self.end if self.end is not None else KeepAlive(*self.key))
        if self._out.pending and now_ms - self._chunk_said_ms >= parameters.attempt_repeat_ms:
            # If it was lost, the gateway sees the gap behind it and asks for the rest.
            self._end_rode_alone = True
            self._chunk_said_ms = now_ms
            self._say(self._out.pending[0][3])

    def _watch_deadlines(self, now_ms: int) -> None:
        if now_ms - self._begun_ms >= self.infer.total_ms:
            self.fail(Refusal.TIMED_OUT, "the request took too long")
        elif self._engine_begun_ms is None:
            if now_ms - self._begun_ms >= parameters.queue_timeout_ms:
                self.fail(Refusal.NODE_BUSY, "no slot became free")
        elif not self._first_token and now_ms - self._engine_begun_ms >= self.infer.first_token_ms:
            self.fail(Refusal.TIMED_OUT, "no first token in time")

    async def _run(self, replica: Replica) -> None:
        try:
            engine = await replica.enter()
            try:
                await self._generate(engine)
            finally:
                replica.leave_slot()
            if self.end is None:
                self._done()
        except EngineError as error:
            self._broke(error.refusal, str(error))
        except Exception:
            log.exception("attempt %s of %s", self.infer.attempt, self.infer.request)
            self._world.counters["attempt_errors"] += 1
            self._broke(Refusal.ENGINE_FAILED, "the node made a mistake")

    async def _generate(self, engine: Engine) -> None:
        self._engine_begun_ms = self._world.clock.now_ms()
        self._receipt.queue_ms = self._engine_begun_ms - self._begun_ms
        self._receipt.engine, self._receipt.tier = engine.digest, engine.tier
        async with contextlib.aclosing(engine.generate(_ask(self.infer))) as answer:  # type: ignore[type-var]
            async for item in answer:
                if type(item) is Piece:
                    self._gather(item)
                    while self._out.full:
                        self._room.clear()
                        await self._room.wait()
                elif isinstance(item, Prefilled):
                    self._prompt_tokens = item.prompt_tokens
                elif isinstance(item, Finish):
                    self._finish = item

    def _broke(self, refusal: Refusal, message: str) -> None:
        if self.end is None and not self._is_closed:
            self.fail(refusal, message)

    def _gather(self, piece: Piece) -> None:
        """A stream's pieces leave with the tick; other answers gather them (`watch`)."""
        self._first_token = True
        self._pieces.append(piece)
        self._pieces_bytes += len(piece.data) + len(piece.logprobs)
        if self._pieces_bytes >= parameters.attempt_buffer_bytes:
            self._flush()
        elif self.infer.stream and not self._at_tick:
            self._at_tick = True
            self._world.outgoing.call_at_tick(self._write)

    def _write(self) -> None:
        self._at_tick = False
        if not self._is_closed and self.end is None:
            self._flush()

    def _flush(self) -> None:
        if not self._pieces:
            return
        pieces = self._pieces
        if len(pieces) == 1:
            ids, data, logprobs = pieces[0].token_ids, pieces[0].data, pieces[0].logprobs
        else:
            ids = tuple(token for piece in pieces for token in piece.token_ids)
            data = b"".join([piece.data for piece in pieces])
            logprobs = b",".join([piece.logprobs for piece in pieces if piece.logprobs])
        self._pieces, self._pieces_bytes = [], 0
        chunk = Chunk(*self.key, self._out.next_seq, ids, data, logprobs)
        size_bytes = len(data) + len(logprobs) + _CHUNK_OVERHEAD_BYTES
        now_ms = self._world.clock.now_ms()
        if not self._out.pending:
            self._waiting_since_ms = now_ms
        self._out.push(chunk, size_bytes=size_bytes, tokens=len(ids))
        self._chunk_said_ms = now_ms
        self._say(chunk)

    def _done(self) -> None:
        finish = self._finish
        if finish is None:
            self.fail(Refusal.ENGINE_FAILED, "the engine stopped without a word")
            return
        self._end_rode_alone |= not self._pieces
        self._flush()
        self._prompt_tokens = finish.prompt_tokens
        self._receipt.prefill_ms, self._receipt.decode_ms = finish.prefill_ms, finish.decode_ms
        reason: FinishReason = "length" if finish.reason == "length" else "stop"
        self._record_end(reason)
        self.end = Done(
            *self.key, self._last_seq, reason, self._prompt_tokens, self._tokens_sent,
            self._receipt.queue_ms, finish.prefill_ms, finish.decode_ms,
        )  # fmt: skip
        self._waiting_since_ms = self._world.clock.now_ms()
        self._over()
        self._say(self.end)

    def fail(self, refusal: Refusal, message: str) -> None:
        """After this no token leaves; what was handed on is still acknowledged, and billed."""
        self._stop_engine()
        self.end = Failed(*self.key, refusal, message)
        self._say(self.end)
        if self._out.next_seq == 0:
            self._world.journal.append(Gone(self._receipt.receipt))
            self._close()
            return
        self._record_end("failed")
        self._waiting_since_ms = self._world.clock.now_ms()

    def _record_end(self, outcome: str) -> None:
        self._world.journal.append(
            Ended(
                self._receipt.receipt,
                self._prompt_tokens,
                self._tokens_sent,
                outcome,
                self._receipt.queue_ms,
                self._receipt.prefill_ms,
                self._receipt.decode_ms,
            )
        )

    def interrupt(self) -> None:
        """The agent ends: what was acknowledged is billed."""
        self._finalise(self._outcome_of_end() if self.end is not None else "failed")

    def drop(self) -> None:
        """Without a word or a receipt, as if the process were killed."""
        self._is_closed = True
        self._stop_engine()

    def _outcome_of_end(self) -> str:
        if isinstance(self.end, Done) and not self._out.pending:
            return self.end.finish_reason
        return "failed" if isinstance(self.end, Failed) else "abandoned"

    def _finalise(self, outcome: str) -> None:
        assert not self._is_closed
        self._stop_engine()
        receipt = self._receipt
        receipt.outcome = outcome
        receipt.prompt_tokens = self._prompt_tokens
        receipt.output_digest = Digest(self._output_hash.hexdigest())
        billing.bill(receipt, self._out.acknowledged_tokens)
        self._world.receipts.add(receipt)
        if self.end is None:
            self.end = Failed(*self.key, Refusal.CANCELLED, outcome)
        self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._closed(self)

    def _over(self) -> None:
        """Nothing more is being made."""
        if self._under_way:
            self._under_way = False
            self._world.outgoing.attempts -= 1

    def _stop_engine(self) -> None:
        self._over()
        if self._task is not None:
            self._task.cancel()

    @property
    def _last_seq(self) -> int:
        return self._out.next_seq - 1

    @property
    def _tokens_sent(self) -> int:
        return self._out.acknowledged_tokens + sum(tokens for _, _, tokens, _ in self._out.pending)

    def _say_soon(self, item: ToGateway) -> None:
        self._said_ms = self._world.clock.now_ms()
        self._world.outgoing.send_soon(self.gateway, item)

    def _say(self, item: ToGateway) -> None:
        self._said_ms = self._world.clock.now_ms()
        self._world.outgoing.send(self.gateway, item)


def _ask(infer: Infer) -> Ask:
    sampling = infer.sampling
    return Ask(
        messages=infer.messages,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=sampling.stop,
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs,
    )
