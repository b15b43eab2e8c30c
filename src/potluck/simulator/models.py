"""A model store that has everything, after a while, or fails as it is told."""

import asyncio
from pathlib import Path

from potluck.core.ids import Digest
from potluck.ports.models import ModelError, Progress


class FakeModels:
    def __init__(self, *, fetch_ms: int = 100) -> None:
        self.errors: list[ModelError] = []
        """Raised by the next calls, one each."""
        self._fetch_ms = fetch_ms

    async def obtain(
        self, digest: Digest, size_bytes: int, sources: tuple[tuple[str, str], ...],
        progress: Progress,
    ) -> Path:  # fmt: skip
        await asyncio.sleep(self._fetch_ms / 1000)
        progress(size_bytes, size_bytes)
        if self.errors:
            raise self.errors.pop(0)
        assert sources or size_bytes >= 0
        return Path("/nowhere") / f"{digest}.gguf"
