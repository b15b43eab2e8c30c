"""What a starting pool is waiting for: a line, and a bar for each model that is being fetched."""

from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

from potluck.cli import output
from potluck.messages.views import NodeView


class Starting:
    """Drawn on standard error, so that standard output stays for what was asked; only where
    somebody watches."""

    def __init__(self) -> None:
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
            console=output.errors, transient=True, disable=not output.errors.is_terminal,
        )  # fmt: skip
        self._line: TaskID | None = None
        self._of_node: dict[str, TaskID] = {}

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

    def say(self, text: str) -> None:
        assert self._line is not None
        self._bars.update(self._line, description=text)

    def show(self, nodes: list[NodeView]) -> None:
        for node in nodes:
            for replica in node.replicas:
                name = f"{node.name} fetches {replica.model}"
                fetching = replica.state == "fetching"
                if fetching and name not in self._of_node:
                    self._of_node[name] = self._bars.add_task(name, total=replica.size_bytes)
                if name in self._of_node:
                    done = replica.fetched_bytes if fetching else replica.size_bytes
                    self._bars.update(self._of_node[name], completed=done)

    def end(self) -> None:
        """Nothing is waited for any more."""
        self._bars.stop()
