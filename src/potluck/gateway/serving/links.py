"""What goes to nodes: all words of one loop turn for one node travel in one message (ADR 0003)."""

import asyncio
from collections.abc import Callable

from potluck.core import parameters
from potluck.core.ids import NodeId
from potluck.gateway.serving.speech import Speech
from potluck.messages import subjects
from potluck.messages.serving import Infer, Serve, ToNode


class Links:
    """`before_send` runs first in each turn; what it says leaves in the same turn."""

    def __init__(self, speech: Speech, before_send: Callable[[], None]) -> None:
        self._speech = speech
        self._before_send = before_send
        self._waiting: dict[NodeId, list[ToNode]] = {}
        self._urgent: set[NodeId] = set()
        self._scheduled = False
        self._gathering = False

    def say(self, node: NodeId, word: ToNode) -> None:
        """Leaves with this loop turn."""
        self._urgent.add(node)
        self._append(node, word)
        self.schedule()

    def say_soon(self, node: NodeId, word: ToNode) -> None:
        """Nobody waits for it: it goes along with an urgent word, or after a short while."""
        self._append(node, word)
        if not self._gathering:
            self._gathering = True
            loop = asyncio.get_running_loop()
            loop.call_later(parameters.acknowledgement_gather_ms / 1000, self._gathered)

    def schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def flush(self) -> None:
        for node in list(self._waiting):
            self._send(node, self._waiting.pop(node))
        self._urgent.clear()

    def _append(self, node: NodeId, word: ToNode) -> None:
        words = self._waiting.get(node)
        if words is None:
            self._waiting[node] = [word]
        else:
            words.append(word)

    def _gathered(self) -> None:
        self._gathering = False
        self.flush()

    def _turn(self) -> None:
        try:
            self._before_send()
        finally:
            self._scheduled = False
            urgent, self._urgent = self._urgent, set()
            for node in urgent:
                words = self._waiting.pop(node, None)
                if words:
                    self._send(node, words)

    def _send(self, node: NodeId, words: list[ToNode]) -> None:
        """In messages far below the bus's largest payload, in order. One that cannot be handed over
        is lost: orders and acknowledgements are repeated by `Conversations.tick`."""
        subject = subjects.subject(self._speech.pool, self._speech.me, "serve", node)
        first = size_bytes = 0
        for index, word in enumerate(words):
            word_bytes = _WORD_BYTES
            if type(word) is Infer:
                word_bytes += len(word.messages)
            if size_bytes and size_bytes + word_bytes > parameters.batch_bytes_max:
                self._speech.tell_on(subject, Serve(items=words[first:index]))
                first, size_bytes = index, 0
            size_bytes += word_bytes
        self._speech.tell_on(subject, Serve(items=words[first:] if first else words))


_WORD_BYTES = 2 * 1024
"""More than any word takes beside an order's messages: names, a seal, four stop sequences."""
