"""Identity before action: whoever starts something names it first."""

from typing import Protocol


class Ids(Protocol):
    def ulid(self) -> str:
        """26 Crockford letters; later ones of one process sort higher."""

    def secret(self, size_bytes: int) -> bytes:
        """Unguessable bytes, for keys."""
