"""GPUs and the like, behind one question."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    kind: str
    name: str
    memory_bytes: int


class Accelerators(Protocol):
    def list(self) -> Sequence[Accelerator]:
        """Never blocks on a driver; an empty list where there is none."""
