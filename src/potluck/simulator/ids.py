"""Ids and secrets from a seed, so that equal seeds give equal worlds."""

import random

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class SeededIds:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0

    def ulid(self) -> str:
        """Counts in its first half, so that later ones sort higher; chance in its second."""
        self._count += 1
        number = self._count << 80 | self._rng.getrandbits(80)
        return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))

    def secret(self, size_bytes: int) -> bytes:
        return self._rng.randbytes(size_bytes)
