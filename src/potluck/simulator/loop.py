"""An asyncio loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import selectors


class DeadlockError(Exception):
    """Nothing is ready and no timer is set: the simulated world has stopped."""


class _JumpingSelector(selectors.SelectSelector):
    loop: "VirtualTimeLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError
        self.loop.now_s += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """No sockets, no threads: whatever waits for the outside world would wait for ever."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s
