"""ULIDs (github.com/ulid/spec): 48 bits of milliseconds, 80 of chance, Crockford base32.

Monotone within one process: in the same millisecond the random part counts up.
"""

import os
import time

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [first + second for first in _CROCKFORD for second in _CROCKFORD]
_RANDOM_BITS = 80


class UlidIds:
    def __init__(self) -> None:
        self._last = 0

    def ulid(self) -> str:
        number = (time.time_ns() // 1_000_000) << _RANDOM_BITS
        if number >> _RANDOM_BITS <= self._last >> _RANDOM_BITS:
            number = self._last + 1
        else:
            number |= int.from_bytes(os.urandom(_RANDOM_BITS // 8), "big")
        self._last = number
        return spell(number)

    def secret(self, size_bytes: int) -> bytes:
        return os.urandom(size_bytes)


def spell(number: int) -> str:
    """128 bits as 26 letters, two at a time."""
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])
