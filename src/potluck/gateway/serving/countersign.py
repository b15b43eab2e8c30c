"""What was delivered, in the gateway's own words: one root and one signature a second.

Off the path; its absence is shown on a receipt, but keeps no money back. Rule: what was signed is
said again, ever more rarely, until the coordinator says that it is stored, or gives no answer for
too long.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from potluck.core import merkle, parameters
from potluck.core.ids import ANY_COORDINATOR, RequestId
from potluck.gateway.serving.speech import Speech
from potluck.messages import envelope
from potluck.messages.money import COUNTERSIGN_DOMAIN, Countersignature, Delivery
from potluck.ports.keys import Signer

Attempt = tuple[RequestId, int]


@dataclass
class _Said:
    leaf: bytes
    first_ms: int
    pause_ms: int


class Countersigner:
    def __init__(self, speech: Speech, signer: Signer) -> None:
        self._speech = speech
        self._signer = signer
        self._waiting: deque[tuple[Attempt, bytes]] = deque()
        self._said: dict[Attempt, _Said] = {}
        """Signed, and not yet known to be stored; oldest first."""
        self._due: list[tuple[int, Attempt]] = []
        """A heap of when each is said again; what was stored meanwhile is passed over."""

    def delivered(self, request: RequestId, attempt: int, tokens: int, total_micro: int) -> None:
        delivery = Delivery(
            request=request, attempt=attempt, delivered_tokens=tokens, total_micro=total_micro
        )
        self._waiting.append(((request, attempt), envelope.encode(delivery)))

    def stored(self, request: RequestId, attempt: int) -> None:
        """The coordinator has it: it is not said again."""
        self._said.pop((request, attempt), None)

    def send(self, now_ms: int) -> None:
        """What is new, and what was not answered for its time."""
        self._repeat(now_ms)
        while self._waiting:
            count = min(len(self._waiting), parameters.deliveries_per_batch_max)
            batch = [self._waiting.popleft() for _ in range(count)]
            leaves = [leaf for _, leaf in batch]
            root = merkle.root(leaves)
            signature = self._signer.sign(COUNTERSIGN_DOMAIN + root)
            body = Countersignature(root=root, signature=signature, deliveries=leaves)
            if not self._speech.tell("countersign", ANY_COORDINATOR, body):
                self._waiting.extendleft(reversed(batch))
                break
            for attempt, leaf in batch:
                self._keep(attempt, leaf, now_ms)
        self._forget_oldest()

    def _repeat(self, now_ms: int) -> None:
        while self._due and self._due[0][0] <= now_ms:
            _, attempt = heapq.heappop(self._due)
            said = self._said.get(attempt)
            if said is None:
                continue
            if now_ms - said.first_ms >= parameters.countersign_repeat_for_ms:
                del self._said[attempt]
            else:
                self._waiting.append((attempt, said.leaf))

    def _keep(self, attempt: Attempt, leaf: bytes, now_ms: int) -> None:
        said = self._said.get(attempt)
        if said is None:
            said = _Said(leaf, now_ms, parameters.countersign_repeat_first_ms)
            self._said[attempt] = said
        else:
            said.pause_ms = min(2 * said.pause_ms, parameters.countersign_repeat_last_ms)
        heapq.heappush(self._due, (now_ms + said.pause_ms, attempt))

    def _forget_oldest(self) -> None:
        while len(self._said) > parameters.countersignatures_kept:
            del self._said[next(iter(self._said))]
        while len(self._waiting) > parameters.countersignatures_kept:
            self._waiting.popleft()
