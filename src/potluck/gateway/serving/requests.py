"""The life of one request: sent, accepted, streaming, finishing, closed.

Rules: a chunk is acknowledged only after it was handed on; before the first token a request may be
tried again elsewhere, after it never, because shown text cannot be unshown. An answer that is not
streamed is shown as a whole: it waits in `pending` until all of it is there, and may be tried again
until then.
"""

import codecs
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import msgspec

from potluck.core import parameters
from potluck.core.delivery import Inbound
from potluck.core.ids import NodeId, RequestId
from potluck.core.refusals import Refusal
from potluck.core.replicas import Replica
from potluck.gateway.serving.asks import ChatAsk, Listener
from potluck.gateway.serving.purses import Held
from potluck.messages.queries import KeyRecord
from potluck.messages.serving import Chunk, Done, FinishReason, Infer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class State(IntEnum):
    SENT = 0
    ACCEPTED = 1
    STREAMING = 2
    FINISHING = 3
    """All was received; the rest is still to be handed on."""
    CLOSED = 4


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Output of one choice since the last drain. `finish` is set with its last one.

    A struct, because it is made for each chunk: a frozen dataclass costs five times as much.
    """

    index: int
    text: str
    logprobs: bytes
    """JSON entries, comma-separated, without brackets; empty if none were asked for."""
    finish: FinishReason | None


@dataclass(frozen=True)
class Failure:
    refusal: Refusal
    message: str


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cost_micro: int


@dataclass(eq=False)
class Life:
    """One request (one choice of what a client asked), changed in place."""

    request: RequestId
    index: int
    completion: "Completion"
    held: Held
    max_micro: int
    bill_prompt: bool
    replica: Replica
    order: Infer
    sent_ms: int
    born_ms: int
    heard_ms: int
    acked_ms: int
    progress_ms: int
    attempt: int = 1
    state: State = State.SENT
    repeated: bool = False
    tried: list[NodeId] = field(default_factory=list)
    inbound: Inbound = field(default_factory=Inbound)
    gap_ms: int = -1
    """When a resend was last asked for; -1: nothing is missing."""
    pending: list[Chunk] = field(default_factory=list)
    pending_bytes: int = 0
    handed_seq: int = -1
    tokens: int = 0
    """All that came; never more than were asked for."""
    handed_tokens: int = 0
    acked_seq: int = -1
    acked_tokens: int = 0
    acked_bytes: int = 0
    """Of what still waits: what was acknowledged all the same, so that the node may go on."""
    done: Done | None = None
    dirty: bool = False
    usage: Usage | None = None
    split: bool = False
    """The decoder holds back a part of a character."""
    decoder: codecs.IncrementalDecoder | None = None
    """Made by the first character that is not ASCII."""

    def take(self, chunk: Chunk) -> bool | None:
        """True: new and next. False: a repeat. None: a gap."""
        taken = self.inbound.take(chunk.seq)
        if taken:
            self.pending.append(chunk)
            count = len(chunk.token_ids)
            self.tokens += count
            self.pending_bytes += (
                len(chunk.data) + len(chunk.logprobs) + 2 * count + parameters.chunk_overhead_bytes
            )
            self.gap_ms = -1
            if self.state < State.STREAMING:
                self.state = State.STREAMING
        return taken

    @property
    def shown(self) -> bool:
        """Something of it may have been read."""
        return self.state >= State.STREAMING and self.order.stream

    def start_over(self, order: Infer, replica: Replica, now_ms: int) -> None:
        """The next attempt, on another node; nothing of the last one was shown."""
        self.attempt += 1
        self.replica = replica
        self.order = order
        self.state = State.SENT
        self.repeated = False
        self.sent_ms = self.heard_ms = self.acked_ms = now_ms
        self.inbound.next_seq = 0
        self.gap_ms = -1
        self.done = None
        self.pending.clear()
        self.pending_bytes = self.acked_bytes = self.tokens = 0
        self.acked_seq, self.acked_tokens = -1, 0

    @property
    def complete(self) -> bool:
        return self.done is not None and self.done.last_seq < self.inbound.next_seq

    def hand_on(self) -> Piece | None:
        """All that waits, as text; whole characters only. None if there is nothing to say."""
        chunks, self.pending = self.pending, []
        self.pending_bytes = self.acked_bytes = 0
        last = self.done is not None and self.complete
        if len(chunks) == 1:
            chunk = chunks[0]
            data, logprobs, self.handed_seq = chunk.data, chunk.logprobs, chunk.seq
            self.handed_tokens += len(chunk.token_ids)
        elif chunks:
            data = b"".join([chunk.data for chunk in chunks])
            logprobs = b",".join([chunk.logprobs for chunk in chunks if chunk.logprobs])
            self.handed_tokens += sum([len(chunk.token_ids) for chunk in chunks])
            self.handed_seq = chunks[-1].seq
        elif last:
            data = logprobs = b""
        else:
            return None
        text = self._text(data, last=last)
        finish = self.done.finish_reason if last and self.done is not None else None
        if not text and not logprobs and finish is None:
            return None
        return Piece(self.index, text, logprobs, finish)

    def _text(self, data: bytes, *, last: bool) -> str:
        """Whole characters; the beginning of a split one waits for its rest."""
        if not self.split and data.isascii():
            return data.decode("ascii")
        if self.decoder is None:
            self.decoder = _new_decoder("replace")
        text = self.decoder.decode(data, last)
        self.split = bool(self.decoder.getstate()[0])
        return text


class Keeper(Protocol):
    """What a completion needs of its owner."""

    def drain(self, completion: "Completion") -> list[Piece]: ...

    def give_up(self, completion: "Completion", refusal: Refusal, message: str) -> None: ...


class Completion:
    """What a client asked: one life for each choice. The HTTP side drains it and may cancel it."""

    __slots__ = (
        "ask", "failure", "key", "listener", "lives", "open", "owner", "quiet_ms",
    )  # fmt: skip

    def __init__(
        self, owner: Keeper, ask: ChatAsk, key: KeyRecord, listener: Listener, now_ms: int
    ) -> None:
        self.owner = owner
        self.ask = ask
        self.key = key
        self.listener = listener
        self.lives: list[Life] = []
        self.open = 0
        """Choices that have not ended."""
        self.failure: Failure | None = None
        self.quiet_ms = now_ms
        """When something was last handed on."""

    def drain(self) -> list[Piece]:
        """Takes what waits, which counts as handed on: call it only when the socket has room."""
        return self.owner.drain(self)

    def cancel(self) -> None:
        """The client left, or is done with: engines stop, money is counted up to what was shown."""
        self.owner.give_up(self, Refusal.CANCELLED, "the client left")

    @property
    def ended(self) -> bool:
        return self.open == 0

    @property
    def complete(self) -> bool:
        """Everything of every choice is here."""
        return all(life.complete for life in self.lives)

    @property
    def usage(self) -> Usage:
        """Sums over all choices; only the first bills the prompt, and only it counts it."""
        first = self.lives[0].usage
        if first is not None and len(self.lives) == 1:
            return first
        used = [life.usage for life in self.lives if life.usage is not None]
        return Usage(
            prompt_tokens=used[0].prompt_tokens if used else 0,
            completion_tokens=sum(one.completion_tokens for one in used),
            cost_micro=sum(one.cost_micro for one in used),
        )
