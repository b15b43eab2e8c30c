"""How a command ends badly: cause and mend in one line, and an exit code that scripts know."""

from potluck.messages import errors


class CommandError(Exception):
    """`mend` tells the reader what to do about it."""

    def __init__(
        self,
        cause: str,
        mend: str = "",
        *,
        code: str = "failed",
        exit_code: int = errors.FAILED,
    ) -> None:
        super().__init__(cause)
        self.cause = cause
        self.mend = mend
        self.code = code
        self.exit_code = exit_code
