"""How commands speak: for people with Rich, for programs one JSON document and nothing else."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from potluck.core import parameters

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
screen = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def json_line(value: Any) -> None:
    """One line on standard output, flushed, so that a waiting program sees it at once."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns whose name starts with `>` are numbers, those with `~` may be cut on a narrow
    screen; all others are shown whole. Cells are plain text, never markup."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    cells = [[*row] for row in rows]
    for index, column in enumerate(columns):
        name = column.lstrip(">~")
        widest = max((cell_len(row[index]) for row in cells), default=0)
        shown.add_column(
            name,
            justify="right" if column.startswith(">") else "left",
            no_wrap=True,
            min_width=None if column.startswith("~") else max(len(name), widest),
        )
    for row in cells:
        shown.add_row(*(styled(cell) for cell in row))
    # Piped output has no width to respect, and a cut id is of no use there.
    screen.print(shown, crop=False, soft_wrap=not screen.is_terminal)


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


def short(identity: str) -> str:
    """Enough to tell it from its neighbours: a ULID begins with its time, so its end is shown."""
    kind, _, rest = identity.partition("_")
    return f"{kind}_…{rest[-6:]}" if len(rest) > 9 else identity
