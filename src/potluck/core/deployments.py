"""What a node should serve, compared with what it says it serves.

Level-triggered: the comparison is made again and again, so no lost message matters for long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from potluck.core.ids import Digest

ReplicaState = Literal["fetching", "loading", "ready", "failed", "stopping"]


@dataclass(frozen=True, slots=True)
class Load:
    digest: Digest


@dataclass(frozen=True, slots=True)
class Unload:
    digest: Digest


Effect = Load | Unload


def reconcile(
    wanted: Sequence[Digest], actual: Mapping[Digest, ReplicaState]
) -> tuple[Effect, ...]:
    """What to do so that what is becomes what should be; nothing when it already is.

    What is under way counts as done: a fetch is not begun twice. A failure is tried again by
    whoever keeps the back-off, not here.
    """
    unloads = [
        Unload(digest)
        for digest in sorted(actual)
        if digest not in wanted and actual[digest] != "stopping"
    ]
    loads = [Load(digest) for digest in wanted if digest not in actual]
    # Memory is given back before it is asked for.
    return (*unloads, *loads)
