"""What a requester asks for, after validation: the words between http and serving."""

from dataclasses import dataclass
from typing import Protocol

from potluck.messages.serving import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk:
    model: str
    messages: bytes
    """JSON array of `{"role", "content"}`; its size bounds the prompt's tokens."""
    max_tokens: int | None
    """None: the model's context is the bound."""
    sampling: Sampling
    """`max_tokens` in it is filled in once the replica is known."""
    stream: bool
    choices: int = 1


class Listener(Protocol):
    """The side that hands output on to a socket. Called on the loop; must return at once."""

    def wake(self) -> None:
        """There is something to drain; said at most once a loop turn."""

    def quiet(self) -> None:
        """Nothing was handed on for a while, but the answer is still being made."""

    def broken(self) -> None:
        """The answer cannot be written: whoever waits for it must not wait for ever."""
