"""What executes a model: an engine that is started, asked and stopped."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from potluck.core.ids import Digest
from potluck.core.refusals import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    name: str
    digest: Digest
    path: Path
    """The verified file."""
    context_tokens: int
    """For each slot."""
    slots: int
    threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    messages: bytes
    """JSON array of `{"role", "content"}`."""
    max_tokens: int
    temperature: float | None
    top_p: float | None
    stop: tuple[str, ...]
    seed: int | None
    top_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens and their bytes; `logprobs` as in `messages.serving.Chunk`."""

    token_ids: tuple[int, ...]
    data: bytes
    logprobs: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The engine's own counts."""

    reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    completion_tokens: int
    prefill_ms: int
    decode_ms: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt was read: its token count, before the first piece. An abort is billed by it."""

    prompt_tokens: int


class EngineError(Exception):
    """The engine refused or failed; `refusal` says which, for the requester."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class Engine(Protocol):
    """One loaded model."""

    @property
    def digest(self) -> Digest:
        """Of the engine's binary: part of its redundancy class."""

    @property
    def tier(self) -> str:
        """The sandbox it runs in: `full` or `limited`."""

    @property
    def alive(self) -> bool: ...

    def generate(self, ask: Ask) -> AsyncIterator[Piece | Prefilled | Finish]:
        """Pieces as they are decoded; `Finish` last. Closing the iterator (`aclose`) stops the
        engine within one decoding step. Raises `EngineError`."""

    async def stop(self) -> None: ...


class Runtime(Protocol):
    async def start(self, spec: ModelSpec) -> Engine:
        """Returns when the engine answers. Raises `EngineError`."""
