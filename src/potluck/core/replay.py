"""Replay is refused by (sender, boot id, sequence), never by clocks.

A sliding window as in RFC 4303, section 3.4.3: late but new is accepted, seen or too old is not.
Boot ids are ULIDs, so a later start of the same sender sorts higher and ends the earlier one.
"""

from dataclasses import dataclass

from potluck.core import parameters
from potluck.core.ids import BootId


@dataclass
class Window:
    """Per sender; changed in place, since it is met by every message."""

    boot: BootId = BootId("")
    highest: int = 0
    seen: int = 0
    """Bit n set: sequence `highest - n` was seen."""

    def admit(self, boot: BootId, sequence: int) -> bool:
        """Whether the message is new; if so it is marked as seen. Sequences start at 1."""
        if sequence < 1 or boot < self.boot:
            return False
        if boot > self.boot:
            self.boot, self.highest, self.seen = boot, 0, 0
        ahead = sequence - self.highest
        if ahead > 0:
            if ahead >= parameters.replay_window:
                self.seen = 1
            else:
                self.seen = (self.seen << ahead | 1) & ((1 << parameters.replay_window) - 1)
            self.highest = sequence
            return True
        if -ahead >= parameters.replay_window or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True
