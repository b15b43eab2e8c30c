"""Time, as the shell sees it. The core is told the time; it never asks."""

from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Monotonic milliseconds of this process; compare only with itself."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970 by this machine's clock: for what must survive a restart of the
        same machine, and for people. Never compared with another machine's."""

    async def sleep_ms(self, duration_ms: int) -> None: ...
