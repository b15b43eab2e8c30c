"""What a starting pool is waiting for: a line, and a bar for each model that is being fetched."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.text import Text

from potluck.cli import output
from potluck.messages.views import NodeView

_SAY_EVERY_S: Final = 10.0


class Starting:
    """Drawn on standard error, so that standard output stays for what was asked. Where nobody
    watches, lines say from time to time what is waited for. Failures are said at once, and once."""

    def __init__(
        self, mend_of: Callable[[str], str], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`mend_of` tells what to do if the node of that name cannot serve."""
        self._mend_of = mend_of
        self._now_s = now_s
        self._watched = output.errors.is_terminal
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Bytes(),
            console=output.errors, transient=True, disable=not self._watched,
        )  # fmt: skip
        self._line: TaskID | None = None
        self._of_node: dict[str, TaskID] = {}
        self._failures: set[tuple[str, str]] = set()
        self._began_s = now_s()
        self._said_s = self._began_s

    def __enter__(self) -> "Starting":
        self._bars.start()
        self._line = self._bars.add_task("starting", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def show(self, reason: str, nodes: list[NodeView]) -> None:
        assert self._line is not None
        self._bars.update(self._line, description=reason)
        self._show_fetching(nodes)
        self._say_failures(nodes)
        now_s = self._now_s()
        if not self._watched and now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            waited_s = round(now_s - self._began_s)
            output.note(f"waiting for {waited_s} s: {_doing(reason, nodes)}")

    def end(self) -> None:
        """Nothing is waited for any more."""
        self._bars.stop()

    def _show_fetching(self, nodes: list[NodeView]) -> None:
        for node in nodes:
            for replica in node.replicas:
                name = f"{node.name} fetches {replica.model}"
                fetching = replica.state == "fetching"
                if fetching and name not in self._of_node:
                    self._of_node[name] = self._bars.add_task(name, total=replica.size_bytes)
                if name in self._of_node:
                    done = replica.fetched_bytes if fetching else replica.size_bytes
                    self._bars.update(self._of_node[name], completed=done)

    def _say_failures(self, nodes: list[NodeView]) -> None:
        """Nodes that fail alike share a line; engines stamp words with times, reasons have none."""
        new: dict[tuple[str, str], list[str]] = {}
        for node in nodes:
            for replica in node.replicas:
                failure = (node.name, output.reason(replica.detail))
                if replica.state == "failed" and failure not in self._failures:
                    self._failures.add(failure)
                    new.setdefault((replica.model, failure[1]), []).append(node.name)
        for (model, why), names in new.items():
            output.error(f"{', '.join(names)} cannot serve {model}: {why}", self._mend_of(names[0]))


class _Bytes(DownloadColumn):
    """Nothing for what has no size."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


def _doing(reason: str, nodes: list[NodeView]) -> str:
    found = [
        f"{node.name} {output.replica(replica)}" for node in nodes for replica in node.replicas
    ]
    return f"{reason.rstrip('.')}: {', '.join(found)}" if found else reason
