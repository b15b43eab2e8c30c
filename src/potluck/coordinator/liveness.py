"""Silence judged each second: of a node, of many at once, and our own.

Rule: our silence is not theirs. While we could not listen (a stalled loop, a lost bus), nobody's
clock runs.
"""

import dataclasses

from potluck.coordinator.membership import Member, Roster
from potluck.core import nodes, parameters
from potluck.core.nodes import Node, TimePassed


class Watch:
    def __init__(self, roster: Roster, now_ms: int) -> None:
        self._roster = roster
        self._ticked_ms = now_ms
        self.frozen = False

    def tick(self, now_ms: int, listening: bool) -> tuple[list[Member], bool]:
        """Members whose liveness changed, and whether evictions froze or resumed just now."""
        if not listening:
            return [], False  # The gap grows, and is forgiven once the bus is back.
        stalled_ms = now_ms - self._ticked_ms - parameters.liveness_tick_ms
        self._ticked_ms = now_ms
        members = list(self._roster.members.values())
        if stalled_ms >= parameters.stall_ms_min:
            for member in members:
                member.node = _forgiven(member.node, stalled_ms, now_ms)
        frozen = nodes.mass_silence([member.node for member in members], now_ms)
        turned = frozen != self.frozen
        self.frozen = frozen
        event = TimePassed(now_ms, frozen)
        return [one for one in members if self._roster.apply(one, event)], turned


def _forgiven(node: Node, stalled_ms: int, now_ms: int) -> Node:
    closed_ms = None if node.closed_ms is None else min(now_ms, node.closed_ms + stalled_ms)
    heard_ms = min(now_ms, node.heard_ms + stalled_ms)
    return dataclasses.replace(node, heard_ms=heard_ms, closed_ms=closed_ms)
