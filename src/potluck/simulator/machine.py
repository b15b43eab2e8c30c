"""A simulated process: all tasks that it starts, directly or not, end with it.

Tasks and callbacks inherit the process they were made in through a context variable, as threads
inherit theirs from the kernel.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from potluck.simulator.network import MemoryBus, Network

ValueT = TypeVar("ValueT")
_current: contextvars.ContextVar["Machine | None"] = contextvars.ContextVar("machine", default=None)


class Machine:
    """One start of one process; a restart is another machine with the same identity."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.bus: MemoryBus | None = None
        self._context = contextvars.copy_context()
        self._context.run(_current.set, self)
        self._tasks: set[asyncio.Task[Any]] = set()

    def connect(self, network: Network, identity: str, *, privileged: bool = False) -> MemoryBus:
        self.bus = network.bus(identity, privileged=privileged, enter=self.enter)
        return self.bus

    def enter(self, function: Callable[..., ValueT], *arguments: Any) -> ValueT:
        """Runs `function` as this process would."""
        return self._context.copy().run(function, *arguments)

    def spawn(self, work: Coroutine[Any, Any, ValueT]) -> "asyncio.Task[ValueT]":
        loop = asyncio.get_running_loop()
        return self.enter(loop.create_task, work)

    def kill(self) -> None:
        """As `kill -9`: what it says from now on reaches nobody, and it will not run again."""
        self.alive = False
        if self.bus is not None:
            self.bus.drop()
        for task in sorted(self._tasks, key=lambda one: one.get_name()):
            task.cancel()

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def current() -> Machine | None:
    return _current.get()


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Makes `loop` tell machines of their tasks, and name tasks alike in every run."""
    count = 0

    def factory(
        owner: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Task[Any]":
        nonlocal count
        count += 1
        options["name"] = f"task-{count:09}"
        task = asyncio.Task(work, loop=owner, **options)
        machine = current()
        if machine is not None:
            machine.adopt(task)
            if not machine.alive:
                task.cancel()
        return task

    loop.set_task_factory(factory)  # type: ignore[arg-type]
