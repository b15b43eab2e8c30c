"""How a command ends badly: cause and mend in one line, and an exit code that scripts know."""

from collections.abc import Sequence

from potluck.messages import errors


class CommandError(Exception):
    """`mend` tells the reader what to do about it; `more` are mistakes found beside this one."""

    def __init__(
        self,
        cause: str,
        mend: str = "",
        *,
        code: str = "failed",
        exit_code: int = errors.FAILED,
        more: Sequence["CommandError"] = (),
    ) -> None:
        super().__init__(cause)
        self.cause = cause
        self.mend = mend
        self.code = code
        self.exit_code = exit_code
        self.more = tuple(more)


def usage(cause: str, mend: str, code: str = "usage") -> CommandError:
    """What was typed, or set, cannot be."""
    return CommandError(cause, mend, code=code, exit_code=errors.USAGE)


def together(mistakes: Sequence[CommandError]) -> CommandError:
    """All of them as one, so that they can be mended in one go. There is at least one."""
    first, *more = mistakes
    return CommandError(
        first.cause, first.mend, code=first.code, exit_code=first.exit_code, more=more
    )
