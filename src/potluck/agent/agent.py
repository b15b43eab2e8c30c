"""The provider's machine as a node of a pool: it serves models and is paid by receipt.

Rule: whatever comes in is opened, checked for its sender's kind and decoded here, or dropped and
counted; no bytes of a peer can end the agent.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from pathlib import Path

import msgspec

import potluck
from potluck.agent import inventory
from potluck.agent.attempts import World
from potluck.agent.deployments import Deployments
from potluck.agent.frames import Outgoing
from potluck.agent.heartbeat import Presence
from potluck.agent.intake import Intake
from potluck.agent.journal import Journal
from potluck.agent.receipts import Receipts
from potluck.agent.tasks import Tasks
from potluck.core import parameters
from potluck.core.ids import AccountId, BootId, GatewayId, node_id
from potluck.messages import envelope, subjects
from potluck.messages.membership import Hello, deploy_decoder, rehello_decoder
from potluck.messages.money import receipts_ack_decoder
from potluck.ports.accelerators import Accelerators
from potluck.ports.bus import Bus, Delivery, Subscription
from potluck.ports.clock import Clock
from potluck.ports.ids import Ids
from potluck.ports.keys import Signer
from potluck.ports.models import ModelStore
from potluck.ports.runtime import Runtime

log = logging.getLogger(__name__)
_GATEWAYS, _COORDINATORS = "gw_", "co_"


class Agent:
    """`tier`: the sandbox's (tier, reason). `data`: this node's own folder. The bus and the keys
    belong to whoever made them, and are closed by them."""

    def __init__(
        self, *, pool: str, name: str, account: AccountId, signer: Signer, bus: Bus, clock: Clock,
        ids: Ids, runtime: Runtime, models: ModelStore, accelerators: Accelerators, data: Path,
        threads: int, tier: tuple[str, str],
    ) -> None:  # fmt: skip
        self.node = node_id(signer.public_key)
        self.counters: Counter[str] = Counter()
        self._pool, self._name, self._account = pool, name, account
        self._signer, self._bus, self._clock = signer, bus, clock
        self._accelerators, self._data, self._tier = accelerators, data, tier
        self._guard = envelope.Guard()
        self._tasks = Tasks()
        self._subscription: Subscription | None = None
        self._alive = True
        stamp = envelope.Stamp(BootId(ids.ulid()))
        self._journal = Journal(data / "journal")
        self.receipts = Receipts(
            pool=pool, node=self.node, bus=bus, stamp=stamp, signer=signer, clock=clock,
            journal=self._journal, refused=data / "refused_receipts.jsonl",
        )  # fmt: skip
        self.deployments = Deployments(
            runtime=runtime, models=models, clock=clock, tasks=self._tasks, threads=threads,
            changed=lambda: self.presence.soon(),  # noqa: PLW0108 (made below)
        )  # fmt: skip
        self.presence = Presence(
            pool=pool, node=self.node, bus=bus, stamp=stamp, clock=clock, data=data,
            hello=self._hello, reports=self.deployments.reports,
            revision=lambda: self.deployments.revision, receipts_waiting=self.receipts.__len__,
        )  # fmt: skip
        world = World(
            node=self.node, tier=tier[0], clock=clock, tasks=self._tasks, journal=self._journal,
            outgoing=Outgoing(
                pool=pool, node=self.node, bus=bus, stamp=stamp, journal=self._journal
            ),
            receipts=self.receipts, counters=self.counters,
        )  # fmt: skip
        self.intake = Intake(world, self.deployments)

    async def start(self) -> None:
        """Returns at once: what is served comes from the coordinator, when it answers."""
        self.receipts.resume()
        self.intake.resume()
        self._subscription = await self._bus.subscribe(
            subjects.received_by(self._pool, self.node), self._receive
        )
        self._tasks.start(self.presence.present())
        self._tasks.start(self.presence.beat_for_ever())
        self._tasks.start(self._reconcile_for_ever())

    async def stop(self) -> None:
        """Ends what runs, bills it, stops the engines, and waits a little for the coordinator."""
        await self.intake.drain()
        self.presence.bye("stopped")
        self.receipts.flush()
        await asyncio.gather(self._told(), self.deployments.stop())
        if self._subscription is not None:
            await self._subscription.close()
        self.receipts.close()
        await self._tasks.cancel_and_wait()
        with contextlib.suppress(OSError):
            self._journal.flush()
        self._journal.close()

    async def _told(self) -> None:
        deadline_ms = self._clock.now_ms() + parameters.agent_drain_ms
        while len(self.receipts) and self._clock.now_ms() < deadline_ms:
            await self._clock.sleep_ms(parameters.chunk_tick_ms)

    def kill(self) -> None:
        """Nothing is said and nothing finished, as after `kill -9`; for simulated machines."""
        self._alive = False
        self.intake.drop()
        self.receipts.close()
        self._tasks.cancel()
        self._journal.close()

    async def _reconcile_for_ever(self) -> None:
        while True:
            try:
                self.deployments.reconcile()
            except Exception:
                log.exception("what is served was not brought in line")
            await self._clock.sleep_ms(parameters.reconcile_ms)

    def _hello(self) -> Hello:
        return Hello(
            public_key=self._signer.public_key,
            name=self._name,
            account=self._account,
            version=potluck.__version__,
            tier=self._tier[0],
            tier_reason=self._tier[1],
            inventory=inventory.take(self._accelerators, self._data),
        )

    def _receive(self, delivery: Delivery) -> None:
        if not self._alive:
            return
        sender = subjects.sender_of(delivery.subject)
        try:
            body = self._guard.open(sender, delivery.payload)
            self._handle(subjects.verb_of(delivery.subject), sender, body)
        except envelope.ReplayedError:
            self.counters["replayed"] += 1
        except envelope.VersionError:
            self.counters["wire_version"] += 1
        except (msgspec.DecodeError, envelope.MalformedError):
            self.counters["malformed"] += 1
        except Exception:
            self.counters["errors"] += 1
            log.exception("a message of %s", sender)

    def _handle(self, verb: str, sender: str, body: memoryview) -> None:
        """Which kind of peer may say what; the server's permissions say who it is."""
        if verb == "serve" and sender.startswith(_GATEWAYS):
            self.intake.receive(GatewayId(sender), body)
        elif not sender.startswith(_COORDINATORS):
            self.counters["foreign"] += 1
        elif verb == "receipts_ack":
            self.receipts.acknowledge(receipts_ack_decoder.decode(body))
        elif verb == "deploy":
            if not self.deployments.order(deploy_decoder.decode(body)):
                self.counters["stale_deploy"] += 1
        elif verb == "rehello":
            rehello_decoder.decode(body)
            self.deployments.forget_revision()
            self.presence.rehello()
        else:
            self.counters["unknown_verb"] += 1
