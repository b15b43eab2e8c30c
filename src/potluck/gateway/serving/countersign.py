"""What was delivered, in the gateway's own words: one root and one signature a second.

Off the path; its absence is shown on a receipt, but keeps no money back.
"""

from collections import deque

from potluck.core import merkle, parameters
from potluck.core.ids import ANY_COORDINATOR, RequestId
from potluck.gateway.serving.speech import Speech
from potluck.messages import envelope
from potluck.messages.money import COUNTERSIGN_DOMAIN, Countersignature, Delivery
from potluck.ports.keys import Signer


class Countersigner:
    def __init__(self, speech: Speech, signer: Signer) -> None:
        self._speech = speech
        self._signer = signer
        self._waiting: deque[bytes] = deque()

    def delivered(self, request: RequestId, attempt: int, tokens: int, total_micro: int) -> None:
        delivery = Delivery(
            request=request, attempt=attempt, delivered_tokens=tokens, total_micro=total_micro
        )
        self._waiting.append(envelope.encode(delivery))

    def send(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), parameters.deliveries_per_batch_max)
            leaves = [self._waiting.popleft() for _ in range(count)]
            root = merkle.root(leaves)
            signature = self._signer.sign(COUNTERSIGN_DOMAIN + root)
            body = Countersignature(root=root, signature=signature, deliveries=leaves)
            if not self._speech.tell("countersign", ANY_COORDINATOR, body):
                self._waiting.extendleft(reversed(leaves))
                return
