"""How commands speak: for people with Rich, for programs one JSON document and nothing else."""

import io
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from potluck.core import parameters
from potluck.messages import errors as exits
from potluck.messages.views import ReplicaView

STYLES = {
    "alive": "green",
    "ready": "green",
    "suspect": "yellow",
    "fetching": "yellow",
    "loading": "yellow",
    "dead": "red",
    "failed": "red",
    "full": "green",
    "limited": "yellow",
}


_FLEXIBLE_MIN: Final = 6


class _Errors(Console):
    """Both streams may lead to one place: what was said first must stand there first."""

    def print(self, *objects: Any, **options: Any) -> None:
        sys.stdout.flush()
        super().print(*objects, **options)


# Where nobody watches lines stay whole: whoever reads a pipe or a log breaks them himself.
screen = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
errors = _Errors(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def prepare() -> None:
    """A terminal that lacks a letter shows another in its place, and nothing breaks off."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def help_without_command(context: typer.Context) -> None:
    """For a command that only leads to others: without one of them it says which there are."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(exits.USAGE)


def json_line(value: Any) -> None:
    """One line on standard output, flushed, so that a waiting program sees it at once."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def error(cause: str, mend: str) -> None:
    errors.print(f"[bold red]error:[/] {escape(cause)}")
    if mend:
        errors.print(f"[bold]mend:[/] {escape(mend)}")


def note(text: str) -> None:
    """Beside what was asked for."""
    errors.print(escape(text), style="dim")


def line(text: str, style: str = "") -> None:
    """To be copied: the terminal breaks it where it must, we do not."""
    screen.print(escape(text), style=style, soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns whose name starts with `>` are numbers; those with `~` go on below where the screen
    is narrow; all others stay in one piece. Nothing is cut. Cells are plain text, never markup."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    cells = [[*row] for row in rows]
    for index, column in enumerate(columns):
        name = column.lstrip(">~")
        lines = [line for row in cells for line in row[index].splitlines()]
        widest = max((cell_len(line) for line in (name, *lines)), default=0)
        flexible = column.startswith("~")
        shown.add_column(
            name,
            justify="right" if column.startswith(">") else "left",
            no_wrap=not flexible,
            overflow="fold",
            # On the narrowest screen a column still shows something.
            min_width=min(widest, _FLEXIBLE_MIN) if flexible else widest,
        )
    for row in cells:
        shown.add_row(*(styled(cell) for cell in row))
    screen.print(shown, crop=False)


def styled(cell: str) -> str:
    style = STYLES.get(cell.split(" ")[0])
    return f"[{style}]{escape(cell)}[/]" if style else escape(cell)


def credits(amount_micro: int) -> str:
    """Compute credits with all six decimals: a receipt of 35 micro-credits must not show as 0."""
    sign = "-" if amount_micro < 0 else ""
    whole, micro = divmod(abs(amount_micro), parameters.MICRO_PER_CREDIT)
    return f"{sign}{whole:,}.{micro:06d}"


def price(amount_micro: int) -> str:
    """Compute credits without needless zeros: prices are round numbers."""
    return credits(amount_micro).rstrip("0").rstrip(".")


def size(amount_bytes: int) -> str:
    value = float(amount_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(number: int, name: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def ago(at_ms: int, now_s: float) -> str:
    """How long since, in the largest unit of which there are two."""
    seconds = max(0, round(now_s - at_ms / 1000))
    for length, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}s ago"
    return f"{seconds} s ago"


def moment(at_ms: int) -> str:
    """By the clock of this machine."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_ms / 1000))


_LOG_PREFIX: Final = re.compile(r"^[\d.]+ ([A-Z]) ")


def reason(detail: str) -> str:
    """One sentence of what an engine said at its end: its first error, if it marks one."""
    before, colon, log = detail.partition(": ")
    lines = [text for text in (log or detail).splitlines() if text.strip()]
    marked = [text for text in lines if (found := _LOG_PREFIX.match(text)) and found[1] in "EF"]
    if marked:
        return f"{before}{colon}{' '.join(_LOG_PREFIX.sub('', marked[0]).split())}"
    return " ".join(detail.split()) or "it gave no reason"


def replica(replica: ReplicaView) -> str:
    text = f"{replica.state} {replica.model}"
    if replica.state == "ready":
        return f"{text} {replica.in_flight}/{replica.slots}"
    if replica.state == "fetching" and replica.size_bytes:
        return f"{text} {100 * replica.fetched_bytes // replica.size_bytes} %"
    return text


def short(identity: str) -> str:
    """Enough to tell it from its neighbours: a ULID begins with its time, so its end is shown."""
    kind, _, rest = identity.partition("_")
    return f"{kind}_…{rest[-6:]}" if len(rest) > 9 else identity
