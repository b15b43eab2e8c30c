"""What this node serves, brought in line with what it should serve, again and again.

Rule: a replica takes requests only while it is `ready`; whoever waits for a slot looks again. The
end of an engine is never cancelled: a process or a cgroup would stay.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from potluck.agent.tasks import Tasks
from potluck.core import deployments, parameters
from potluck.core.deployments import ReplicaState
from potluck.core.ids import Digest
from potluck.core.refusals import Refusal
from potluck.messages.membership import Deploy, Deployment, ReplicaReport
from potluck.ports.clock import Clock
from potluck.ports.models import ModelError, ModelStore
from potluck.ports.runtime import Engine, EngineError, ModelSpec, Runtime

log = logging.getLogger(__name__)
_DIGEST_LETTERS = frozenset("0123456789abcdef")


@dataclass(slots=True)
class Replica:
    deployment: Deployment
    slots: asyncio.Semaphore
    state: ReplicaState = "fetching"
    detail: str = ""
    fetched_bytes: int = 0
    engine: Engine | None = None
    asked: int = 0
    """Requests that wait for a slot or have one."""
    in_flight: int = 0
    """Of these, those that have one."""
    work: "asyncio.Task[None] | None" = None
    retry_ms: int | None = None
    """When a failure is tried again; None: not before a new order."""
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def queue_depth(self) -> int:
        """How many requests must end before one that comes now may begin."""
        return max(0, self.asked - self.deployment.slots + 1)

    def leave(self) -> None:
        self.asked -= 1
        if self.asked == 0:
            self.drained.set()

    async def enter(self) -> Engine:
        """Waits for a free place in the engine; say `leave_slot` afterwards. Raises `EngineError`
        if the replica went away meanwhile."""
        await self.slots.acquire()
        if self.engine is None:
            self.slots.release()
            raise EngineError(Refusal.MODEL_NOT_LOADED, "the model was unloaded")
        self.in_flight += 1
        return self.engine

    def leave_slot(self) -> None:
        self.in_flight -= 1
        self.slots.release()


class Deployments:
    def __init__(
        self, *, runtime: Runtime, models: ModelStore, clock: Clock, tasks: Tasks, threads: int,
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """`changed` is called whenever a replica's state is another."""
        self._runtime = runtime
        self._models = models
        self._clock = clock
        self._tasks = tasks
        self._threads = threads
        self._changed = changed
        self._wanted: dict[Digest, Deployment] = {}
        self._replicas: dict[Digest, Replica] = {}
        self._failures: Counter[Digest] = Counter()
        self._work: set[asyncio.Task[None]] = set()
        """All that brings replicas up or down."""
        self._endings: set[asyncio.Task[None]] = set()
        """Engines that are being stopped."""
        self._stopped = False
        self.revision = -1

    def ready(self, digest: Digest) -> Replica | None:
        replica = self._replicas.get(digest)
        return replica if replica is not None and replica.state == "ready" else None

    def order(self, deploy: Deploy) -> bool:
        """False for an order that is older than the last, or that is no order."""
        if deploy.revision < self.revision or not _sound(deploy):
            return False
        if deploy.revision > self.revision:
            # The operator may have mended what no repeat could.
            self._failures.clear()
            for replica in self._replicas.values():
                if replica.state == "failed":
                    replica.retry_ms = self._clock.now_ms()
        self.revision = deploy.revision
        self._wanted = {one.manifest.digest: one for one in deploy.deployments}
        self.reconcile()
        return True

    def forget_revision(self) -> None:
        """Another coordinator, or one with another store, counts anew."""
        self.revision = -1

    def reports(self) -> list[ReplicaReport]:
        return [
            ReplicaReport(
                digest=digest,
                state=one.state,
                slots=one.deployment.slots,
                in_flight=one.asked,
                context_tokens=one.deployment.manifest.context_tokens,
                detail=one.detail,
                fetched_bytes=one.fetched_bytes,
            )
            for digest, one in sorted(self._replicas.items())
        ]

    def reconcile(self) -> None:
        """Level-triggered: called on each order, each failure, and every few seconds."""
        if self._stopped:
            return
        self._notice_dead_engines()
        self._forget_failed_when_due()
        wanted = [digest for digest, one in self._wanted.items() if self._as_wanted(digest, one)]
        actual = {digest: one.state for digest, one in self._replicas.items()}
        for effect in deployments.reconcile(wanted, actual):
            match effect:
                case deployments.Load(digest):
                    self._load(digest)
                case deployments.Unload(digest):
                    self._unload(digest)

    async def stop(self) -> None:
        """Returns when no engine is left."""
        self._stopped = True
        for task in self._work:
            # Once: a second cancellation would break into the first one's clearing up.
            if not task.cancelling():
                task.cancel()
        if self._work:
            await asyncio.wait(self._work)
        for replica in self._replicas.values():
            if replica.engine is not None:
                self._end(replica)
        if self._endings:
            await asyncio.wait(self._endings)
        self._replicas.clear()

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._tasks.start(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _end(self, replica: Replica) -> "asyncio.Task[None]":
        """Whoever still waits for a slot finds no engine, and says so."""
        assert replica.engine is not None
        engine, replica.engine = replica.engine, None
        task = self._tasks.start(engine.stop())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    def _as_wanted(self, digest: Digest, wanted: Deployment) -> bool:
        """False while a replica with other numbers stands in the way: it is unloaded first."""
        replica = self._replicas.get(digest)
        return replica is None or replica.state == "stopping" or replica.deployment == wanted

    def _notice_dead_engines(self) -> None:
        for digest, replica in self._replicas.items():
            if replica.state == "ready" and replica.engine is not None and not replica.engine.alive:
                self._fail(digest, replica, "the engine ended", permanent=False)

    def _forget_failed_when_due(self) -> None:
        now_ms = self._clock.now_ms()
        for digest, replica in list(self._replicas.items()):
            due = replica.retry_ms is not None and replica.retry_ms <= now_ms
            if replica.state == "failed" and due and replica.work is None:
                del self._replicas[digest]

    def _load(self, digest: Digest) -> None:
        deployment = self._wanted[digest]
        replica = Replica(deployment, asyncio.Semaphore(deployment.slots))
        self._replicas[digest] = replica
        replica.work = self._start(self._bring_up(digest, replica))
        self._changed()

    async def _bring_up(self, digest: Digest, replica: Replica) -> None:
        manifest = replica.deployment.manifest
        try:
            path = await self._models.obtain(
                digest,
                manifest.size_bytes,
                tuple((source.kind, source.location) for source in manifest.sources),
                lambda done, _of: self._show_progress(replica, done),
            )
            self._become(replica, "loading", "")
            spec = ModelSpec(
                name=manifest.name, digest=digest, path=path, slots=replica.deployment.slots,
                context_tokens=manifest.context_tokens, threads=self._threads,
                memory_bytes=manifest.memory_bytes,
            )  # fmt: skip
            replica.engine = await self._runtime.start(spec)
            self._become(replica, "ready", f"sandbox {replica.engine.tier}")
        except ModelError as error:
            self._fail(digest, replica, str(error), permanent=error.permanent)
        except EngineError as error:
            self._fail(digest, replica, str(error), permanent=False)
        except Exception as error:
            log.exception("model %s cannot be served", manifest.name)
            self._fail(digest, replica, f"{type(error).__name__}: {error}", permanent=False)
        finally:
            if replica.work is asyncio.current_task():
                replica.work = None

    def _fail(self, digest: Digest, replica: Replica, detail: str, *, permanent: bool) -> None:
        self._failures[digest] += 1
        pause_ms = min(
            parameters.model_retry_first_ms << min(self._failures[digest] - 1, 16),
            parameters.model_retry_last_ms,
        )
        replica.retry_ms = None if permanent else self._clock.now_ms() + pause_ms
        log.error("model %s: %s", replica.deployment.manifest.name, detail)
        self._become(replica, "failed", detail)
        if replica.engine is not None:
            # Its folder and cgroup go, even if its process has.
            replica.work = self._start(self._clear_away(replica))

    async def _clear_away(self, replica: Replica) -> None:
        await asyncio.wait({self._end(replica)})
        replica.work = None

    def _unload(self, digest: Digest) -> None:
        replica = self._replicas[digest]
        before = replica.work
        self._become(replica, "stopping", "")
        replica.work = self._start(self._bring_down(digest, replica, before))

    async def _bring_down(
        self, digest: Digest, replica: Replica, before: "asyncio.Task[None] | None"
    ) -> None:
        """Requests in flight may end first, for a while. "Stopped" is said after it is so."""
        if before is not None:
            if not before.cancelling():
                before.cancel()
            await asyncio.wait({before})
        self._become(replica, "stopping", "")
        if replica.asked:
            replica.drained.clear()
            drain = asyncio.ensure_future(replica.drained.wait())
            limit = asyncio.ensure_future(self._clock.sleep_ms(parameters.unload_drain_ms))
            await asyncio.wait((drain, limit), return_when=asyncio.FIRST_COMPLETED)
            drain.cancel()
            limit.cancel()
        if replica.engine is not None:
            await asyncio.wait({self._end(replica)})
        del self._replicas[digest]
        self._failures.pop(digest, None)
        self._changed()
        self.reconcile()

    def _become(self, replica: Replica, state: ReplicaState, detail: str) -> None:
        replica.state, replica.detail = state, detail
        self._changed()

    def _show_progress(self, replica: Replica, done_bytes: int) -> None:
        """Reported at each tenth, and with every heartbeat."""
        size_bytes = max(1, replica.deployment.manifest.size_bytes)
        tenths = 10 * done_bytes // size_bytes - 10 * replica.fetched_bytes // size_bytes
        replica.fetched_bytes = done_bytes
        if tenths:
            self._changed()


def _sound(deploy: Deploy) -> bool:
    """A coordinator is trusted with what to serve, not with paths or numbers that break us."""
    return len(deploy.deployments) <= parameters.deployments_per_node_max and all(
        one.slots >= 1
        and one.manifest.context_tokens >= 1
        and len(one.manifest.digest) == 64
        and _DIGEST_LETTERS.issuperset(one.manifest.digest)
        for one in deploy.deployments
    )
