"""An answer on a terminal, broken between words as it comes.

Rule: nothing waits. A word that turns out too long for its line is taken back and written on the
next one; and nothing a model says reaches the terminal as a command.
"""

import unicodedata
from collections.abc import Callable
from typing import Final

from rich.cells import cell_len

_TAB: Final = "    "
_ERASE: Final = "\x1b[{}D\x1b[K"
"""So many cells to the left, then empty to the line's end."""


_JOINERS: Final = frozenset("\u200c\u200d")
"""Invisible, and part of some words and pictures."""


def _is_text(letter: str) -> bool:
    return letter.isprintable() or letter in _JOINERS or unicodedata.category(letter) == "Zs"


class Wrapping:
    def __init__(self, width: Callable[[], int]) -> None:
        """`width` is asked again and again: a terminal may be resized."""
        self._width = width
        self._column = 0
        self._word = ""
        """The last word so far; it stands on the screen already."""

    def feed(self, text: str) -> str:
        """What to write for this piece of the answer."""
        # The last cell stays empty: behind it each terminal is in its own state.
        room = max(1, self._width() - 1)
        return "".join(self._letter(letter, room) for letter in text.replace("\t", _TAB))

    def _letter(self, letter: str, room: int) -> str:
        if letter == "\n":
            self._column, self._word = 0, ""
            return letter
        if not _is_text(letter):
            return ""
        if letter == " ":
            self._word = ""
            if self._column >= room:
                return ""  # The line is full: the next word goes below.
            self._column += 1
            return letter
        return self._of_word(letter, room)

    def _of_word(self, letter: str, room: int) -> str:
        cells = cell_len(letter)
        if cells > 1:
            self._word = ""  # Scripts with wide letters break anywhere.
        written = self._break(room) if self._column + cells > room else ""
        self._column += cells
        self._word += letter
        return written + letter

    def _break(self, room: int) -> str:
        """To the next line, with the word if that line can hold it."""
        cells = cell_len(self._word)
        if cells == self._column or cells >= room:
            self._column, self._word = 0, ""
            return "\n"
        self._column = cells
        erased = _ERASE.format(cells) if cells else ""
        return f"{erased}\n{self._word}"
