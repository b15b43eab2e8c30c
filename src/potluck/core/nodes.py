"""The life of a node: alive, suspect, dead; and draining, when its owner or a fault asks for it.

A heartbeat revives from any state but a departure: silence is a guess, and the guess may be wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from potluck.core import parameters
from potluck.core.ids import NodeId

Liveness = Literal["alive", "suspect", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    id: NodeId
    liveness: Liveness
    heard_ms: int
    closed_ms: int | None = None
    """When its connection was seen to close, if that is the last thing known of it."""

    def __post_init__(self) -> None:
        assert self.liveness != "alive" or self.closed_ms is None


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    at_ms: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    at_ms: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    now_ms: int
    frozen: bool
    """Mass silence: nobody dies while it lasts."""


@dataclass(frozen=True, slots=True)
class LeftWillingly:
    at_ms: int


Event = HeartbeatReceived | ConnectionClosed | TimePassed | LeftWillingly


@dataclass(frozen=True, slots=True)
class AnnounceLiveness:
    node: NodeId
    liveness: Liveness


def step(node: Node, event: Event) -> tuple[Node, tuple[AnnounceLiveness, ...]]:
    """The node after the event, and what gateways must be told."""
    match event:
        case HeartbeatReceived(at_ms):
            after = replace(node, liveness="alive", heard_ms=at_ms, closed_ms=None)
        case ConnectionClosed(at_ms):
            after = _close(node, at_ms)
        case TimePassed(now_ms, frozen):
            after = replace(node, liveness=_judged(node, now_ms, frozen))
        case LeftWillingly(at_ms):
            after = replace(node, liveness="dead", closed_ms=at_ms)
        case _:
            assert_never(event)
    if after.liveness == node.liveness:
        return after, ()
    return after, (AnnounceLiveness(node.id, after.liveness),)


def mass_silence(nodes: Sequence[Node], now_ms: int) -> bool:
    """Whether so many fell silent at once that the fault is likely ours.

    A closed connection is not silence: the server saw it go.
    """
    living = [node for node in nodes if node.liveness != "dead" and node.closed_ms is None]
    silent = [node for node in living if now_ms - node.heard_ms >= parameters.suspect_after_ms]
    enough = len(silent) >= parameters.mass_silence_nodes_min
    return enough and 100 * len(silent) >= parameters.mass_silence_share_percent * len(living)


def _close(node: Node, at_ms: int) -> Node:
    if node.liveness == "dead":
        return node
    return replace(node, liveness="suspect", closed_ms=at_ms)


def _judged(node: Node, now_ms: int, frozen: bool) -> Liveness:
    silence_ms = now_ms - node.heard_ms
    if node.liveness == "dead":
        return "dead"
    if node.closed_ms is not None:
        gone = now_ms - node.closed_ms >= parameters.dead_after_closed_ms
        return "dead" if gone else "suspect"
    if silence_ms >= parameters.dead_after_ms and not frozen:
        return "dead"
    return "suspect" if silence_ms >= parameters.suspect_after_ms else "alive"
