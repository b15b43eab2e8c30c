"""Where a model's bytes come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from potluck.core.ids import Digest

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


class ModelError(Exception):
    """The bytes could not be had, or are not those that the digest names."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


class ModelStore(Protocol):
    async def obtain(
        self, digest: Digest, size_bytes: int, sources: tuple[tuple[str, str], ...],
        progress: Progress,
    ) -> Path:  # fmt: skip
        """The local file with this digest, verified; `sources` are (kind, location), tried in
        order. Raises `ModelError`."""
