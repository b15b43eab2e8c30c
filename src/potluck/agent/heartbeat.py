"""Presents the node to the coordinators, and says at intervals that it lives and what it serves."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from potluck.agent import inventory
from potluck.core import parameters
from potluck.core.ids import NodeId
from potluck.messages import envelope, subjects
from potluck.messages.membership import (
    Bye,
    Heartbeat,
    Hello,
    ReplicaReport,
    welcome_decoder,
)
from potluck.messages.subjects import Verb
from potluck.ports.bus import Bus, BusClosedError, BusTimeoutError
from potluck.ports.clock import Clock

log = logging.getLogger(__name__)


class Presence:
    def __init__(
        self, *, pool: str, node: NodeId, bus: Bus, stamp: envelope.Stamp, clock: Clock,
        data: Path, hello: Callable[[], Hello], reports: Callable[[], list[ReplicaReport]],
        revision: Callable[[], int], receipts_waiting: Callable[[], int],
    ) -> None:  # fmt: skip
        self._pool = pool
        self._node = node
        self._bus = bus
        self._stamp = stamp
        self._clock = clock
        self._data = data
        self._hello = hello
        self._reports = reports
        self._revision = revision
        self._receipts_waiting = receipts_waiting
        self._unknown = asyncio.Event()
        self._unknown.set()
        self._beat_due = False
        self.refusal: str | None = None
        """None: not answered yet; empty: welcome; else why the pool will not have this node."""

    async def present(self) -> None:
        """Says hello until welcomed, and again whenever a coordinator asks."""
        while True:
            await self._unknown.wait()
            pause_ms = parameters.hello_pause_first_ms
            while not await self._welcomed():
                await self._clock.sleep_ms(pause_ms)
                pause_ms = min(pause_ms * 2, parameters.hello_pause_last_ms)
            self._unknown.clear()
            self.beat()

    def rehello(self) -> None:
        self._unknown.set()

    async def _welcomed(self) -> bool:
        try:
            answer = await self._bus.request(
                subjects.to_coordinator(self._pool, self._node, "hello"),
                self._stamp.seal(envelope.encode(self._hello())),
                parameters.hello_timeout_ms,
            )
            refusal = welcome_decoder.decode(envelope.split(answer)[2]).refusal
        except (BusTimeoutError, BusClosedError) as error:
            log.info("no coordinator answers: %r", error)
            return False
        except (msgspec.DecodeError, envelope.MalformedError) as error:
            log.warning("a welcome that is none: %s", error)
            return False
        except Exception:
            # The system would not say what this machine has.
            log.exception("no hello")
            return False
        if refusal and refusal != self.refusal:
            log.error("the pool refuses this node: %s", refusal)
        self.refusal = refusal
        return not refusal

    async def beat_for_ever(self) -> None:
        while True:
            self.beat()
            await self._clock.sleep_ms(parameters.heartbeat_ms)

    def soon(self) -> None:
        """Something changed: say so once this loop turn is over."""
        if not self._beat_due:
            self._beat_due = True
            asyncio.get_running_loop().call_soon(self.beat)

    def beat(self) -> None:
        """Never fails: a node that cannot measure itself is alive all the same."""
        self._beat_due = False
        try:
            self._publish(
                "heartbeat",
                Heartbeat(
                    replicas=self._reports(),
                    deploy_revision=self._revision(),
                    cpu_percent=inventory.cpu_percent(),
                    memory_free_bytes=inventory.memory_free_bytes(),
                    disk_free_bytes=inventory.disk_free_bytes(self._data),
                    receipts_waiting=self._receipts_waiting(),
                ),
            )
        except Exception:
            log.exception("no heartbeat")

    def bye(self, reason: str) -> None:
        self._publish("bye", Bye(reason))

    def _publish(self, verb: Verb, body: envelope.Body) -> None:
        subject = subjects.to_coordinator(self._pool, self._node, verb)
        try:
            self._bus.publish(subject, self._stamp.seal(envelope.encode(body)))
        except BusClosedError as error:
            log.warning("%s not sent: %s", verb, error)
