"""The running loop's time, virtual or real, as a clock port."""

import asyncio

WALL_START_MS = 1_800_000_000_000
"""Some day in 2027: simulated wall clocks start here."""


class LoopClock:
    def __init__(self, wall_skew_ms: int = 0) -> None:
        self._wall_skew_ms = wall_skew_ms

    def now_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1000)

    def wall_ms(self) -> int:
        return WALL_START_MS + self._wall_skew_ms + self.now_ms()

    async def sleep_ms(self, duration_ms: int) -> None:
        await asyncio.sleep(duration_ms / 1000)
