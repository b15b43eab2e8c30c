"""Final receipts on their way: one Merkle root and signature a tick, repeated until acknowledged.

Rule: a receipt leaves the disk only when the coordinator says that it was committed or refused.
"""

import asyncio
import contextlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from potluck.agent.journal import Closed, Gone, Journal
from potluck.core import merkle, parameters
from potluck.core.ids import NodeId, ReceiptId
from potluck.messages import envelope, subjects
from potluck.messages.money import RECEIPTS_DOMAIN, Receipt, ReceiptBatch, ReceiptsAck
from potluck.ports.bus import Bus, BusClosedError
from potluck.ports.clock import Clock
from potluck.ports.keys import Signer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    body: bytes
    due_ms: int
    pause_ms: int = parameters.receipt_repeat_first_ms


class Receipts:
    def __init__(
        self, *, pool: str, node: NodeId, bus: Bus, stamp: envelope.Stamp, signer: Signer,
        clock: Clock, journal: Journal, refused: Path,
    ) -> None:  # fmt: skip
        """`refused`: a file of JSON lines, for the provider to look at."""
        self._subject = subjects.to_coordinator(pool, node, "receipts")
        self._bus = bus
        self._stamp = stamp
        self._signer = signer
        self._clock = clock
        self._journal = journal
        self._refused = refused
        self._refused_lines: int | None = None
        self._waiting: dict[ReceiptId, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def resume(self) -> None:
        """Those that the journal holds from an earlier start."""
        for receipt, body in self._journal.final.items():
            self._wait_for(receipt, body)

    def add(self, receipt: Receipt) -> None:
        body = envelope.encode(receipt)
        self._journal.append(Closed(receipt.receipt, body))
        self._wait_for(receipt.receipt, body)

    def acknowledge(self, answer: ReceiptsAck) -> None:
        for receipt in answer.accepted:
            self._forget(receipt)
        for receipt, cause in answer.refused:
            if (known := self._waiting.get(receipt)) is not None:
                log.warning("receipt %s was refused: %s", receipt, cause)
                self._keep_aside(receipt, cause, known.body)
                self._forget(receipt)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def flush(self) -> None:
        """Send all now: the agent is about to end."""
        self._send(list(self._waiting.items()))

    def _wait_for(self, receipt: ReceiptId, body: bytes) -> None:
        due_ms = self._clock.now_ms() + parameters.receipts_tick_ms
        self._waiting[receipt] = _Waiting(body, due_ms)
        self._wake_at(due_ms)

    def _wake_at(self, due_ms: int) -> None:
        if self._timer is not None:
            if self._timer_ms <= due_ms:
                return
            self._timer.cancel()
        self._timer_ms = due_ms
        pause_ms = max(0, due_ms - self._clock.now_ms())
        self._timer = asyncio.get_running_loop().call_later(pause_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        # The timer may be a little early by this clock.
        due = [item for item in self._waiting.items() if item[1].due_ms <= now_ms + 1]
        for _, one in due:
            one.due_ms = now_ms + one.pause_ms
            one.pause_ms = min(one.pause_ms * 2, parameters.receipt_repeat_last_ms)
        try:
            self._send(due)
        except Exception:
            # They are due again soon.
            log.exception("%d receipts were not sent", len(due))
        if self._waiting:
            next_ms = min(one.due_ms for one in self._waiting.values())
            self._wake_at(max(next_ms, now_ms + parameters.receipts_tick_ms))

    def _send(self, items: list[tuple[ReceiptId, _Waiting]]) -> None:
        for start in range(0, len(items), parameters.receipts_per_batch_max):
            bodies = [
                one.body for _, one in items[start : start + parameters.receipts_per_batch_max]
            ]
            root = merkle.root(bodies)
            signature = self._signer.sign(RECEIPTS_DOMAIN + root)
            batch = envelope.encode(ReceiptBatch(root, signature, bodies))
            with contextlib.suppress(BusClosedError):
                self._bus.publish(self._subject, self._stamp.seal(batch))

    def _forget(self, receipt: ReceiptId) -> None:
        if self._waiting.pop(receipt, None) is not None:
            self._journal.append(Gone(receipt))

    def _keep_aside(self, receipt: ReceiptId, cause: str, body: bytes) -> None:
        """Appended; a full file makes room by becoming the older one of two."""
        line = json.dumps({"receipt": receipt, "cause": cause, "body": body.hex()})
        try:
            if self._refused_lines is None:
                self._refused_lines = _lines(self._refused)
            if self._refused_lines >= parameters.receipts_refused_kept:
                self._refused.replace(self._refused.with_suffix(".old.jsonl"))
                self._refused_lines = 0
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            with os.fdopen(os.open(self._refused, flags, 0o600), "w") as file:
                file.write(line + "\n")
            self._refused_lines += 1
        except OSError as error:
            log.warning("refused receipt %s is not kept: %s", receipt, error)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
