"""ULIDs (github.com/ulid/spec): 48 bits of milliseconds, 80 of chance, Crockford base32.

Monotone within one process: in the same millisecond the random part counts up.
"""

import os
import time
from pathlib import Path

from potluck.adapters.keys import write_private

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [first + second for first in _CROCKFORD for second in _CROCKFORD]
_RANDOM_BITS = 80


class UlidIds:
    """`memory`: a file that makes ids of a later start sort higher even if the clock was set back:
    an earlier start's boot id must never look newer. Raises `OSError` if it cannot be kept."""

    def __init__(self, memory: Path | None = None) -> None:
        self._last = 0
        self._not_before_ms = 0
        if memory is not None:
            self._not_before_ms = max(_now_ms(), _remembered_ms(memory) + 1)
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_private(memory, str(self._not_before_ms).encode())

    def ulid(self) -> str:
        number = max(_now_ms(), self._not_before_ms) << _RANDOM_BITS
        if number >> _RANDOM_BITS <= self._last >> _RANDOM_BITS:
            number = self._last + 1
        else:
            number |= int.from_bytes(os.urandom(_RANDOM_BITS // 8), "big")
        self._last = number
        return spell(number)

    def secret(self, size_bytes: int) -> bytes:
        return os.urandom(size_bytes)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _remembered_ms(memory: Path) -> int:
    try:
        return int(memory.read_bytes())
    except (FileNotFoundError, ValueError):
        return 0


def spell(number: int) -> str:
    """128 bits as 26 letters, two at a time."""
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])
