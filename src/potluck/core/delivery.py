"""One stream's chunks, in order and once each: the rule both ends of the wire keep.

The receiver takes chunk n only after n - 1; anything else is a repeat (dropped) or a gap (resent).
The sender keeps what is not acknowledged, and stops reading its engine once a window is full.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from potluck.core import parameters

ChunkT = TypeVar("ChunkT")


@dataclass(slots=True)
class Inbound:
    """Changed in place: it is met by every chunk."""

    next_seq: int = 0

    def take(self, seq: int) -> bool | None:
        """True: the one awaited. False: a repeat. None: a gap, ask again from `next_seq`."""
        if seq == self.next_seq:
            self.next_seq += 1
            return True
        return False if seq < self.next_seq else None


@dataclass(slots=True)
class Outbound(Generic[ChunkT]):
    """What was sent and not yet acknowledged, with each chunk's size and token count."""

    next_seq: int = 0
    acknowledged_seq: int = -1
    """Highest sequence the receiver has handed on; -1 for none."""
    acknowledged_tokens: int = 0
    pending_bytes: int = 0
    pending: deque[tuple[int, int, int, ChunkT]] = field(default_factory=deque)

    @property
    def full(self) -> bool:
        return self.pending_bytes >= parameters.window_bytes

    def push(self, chunk: ChunkT, *, size_bytes: int, tokens: int) -> int:
        seq = self.next_seq
        self.next_seq += 1
        self.pending.append((seq, size_bytes, tokens, chunk))
        self.pending_bytes += size_bytes
        return seq

    def acknowledge(self, seq: int) -> bool:
        """Cumulative. False if it speaks of a chunk that was never sent: the peer is confused."""
        if seq >= self.next_seq:
            return False
        while self.pending and self.pending[0][0] <= seq:
            _, size_bytes, tokens, _ = self.pending.popleft()
            self.pending_bytes -= size_bytes
            self.acknowledged_tokens += tokens
        self.acknowledged_seq = max(self.acknowledged_seq, seq)
        return True

    def again(self, from_seq: int) -> list[ChunkT]:
        """The unacknowledged chunks from `from_seq` on."""
        return [chunk for seq, _, _, chunk in self.pending if seq >= from_seq]
