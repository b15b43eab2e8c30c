"""Every attempt of this node, alive or remembered: who is asked when a gateway says something.

Rule: an attempt is begun once. Its end is remembered, so that a repeat is answered alike.
"""

import asyncio
import logging
from collections import OrderedDict

from potluck.agent import billing
from potluck.agent.attempts import Attempt, Key, World
from potluck.agent.deployments import Deployments
from potluck.core import parameters
from potluck.core.ids import GatewayId
from potluck.core.refusals import Refusal
from potluck.messages.money import receipt_decoder
from potluck.messages.serving import (
    Accepted,
    Ack,
    Cancel,
    Done,
    Failed,
    Infer,
    Resend,
    ToNode,
    serve_decoder,
)

log = logging.getLogger(__name__)


class Intake:
    def __init__(self, world: World, deployments: Deployments) -> None:
        self._world = world
        self._deployments = deployments
        self._live: dict[Key, Attempt] = {}
        self._ended: OrderedDict[Key, tuple[str, Done | Failed]] = OrderedDict()
        self._watching = False
        self._dropped = False
        self.accepting = True

    def resume(self) -> None:
        """Finish, on paper, what an earlier start left unfinished."""
        for body in list(self._world.journal.final.values()):
            self._remember_receipt(body)
        for known in list(self._world.journal.unfinished.values()):
            receipt = billing.after_restart(known)
            self._remember(
                (receipt.request, receipt.attempt), receipt.gateway, "the node was restarted"
            )
            self._world.receipts.add(receipt)

    def _remember_receipt(self, body: bytes) -> None:
        receipt = receipt_decoder.decode(body)
        self._remember(
            (receipt.request, receipt.attempt), receipt.gateway, "the node was restarted"
        )

    def receive(self, gateway: GatewayId, body: "bytes | memoryview") -> None:
        """One batch of a gateway's words. Raises `msgspec.DecodeError`.

        Orders first: while the engine works on them, there is time to close the books of others.
        """
        others: list[ToNode] = []
        begun = False
        for item in serve_decoder.decode(body).items:
            if type(item) is Infer:
                begun = True
                self._receive(gateway, item)
            else:
                others.append(item)
        if begun and others:
            asyncio.get_running_loop().call_soon(self._receive_others, gateway, others)
        else:
            self._receive_others(gateway, others)

    def _receive_others(self, gateway: GatewayId, items: list[ToNode]) -> None:
        for item in items:
            if self._dropped:
                return
            try:
                self._receive(gateway, item)
            except Exception:
                # A mistake about one attempt must not lose what is said about the next.
                self._world.counters["attempt_errors"] += 1
                log.exception("%s from %s", type(item).__name__, gateway)

    def _receive(self, gateway: GatewayId, item: ToNode) -> None:
        key = (item.request, item.attempt)
        attempt = self._live.get(key)
        if attempt is not None:
            if attempt.gateway != gateway:
                self._world.counters["foreign"] += 1
            else:
                self._continue(attempt, item)
        elif (ended := self._ended.get(key)) is not None:
            if ended[0] != gateway:
                self._world.counters["foreign"] += 1
            elif isinstance(item, Infer | Resend):
                self._answer_alike(gateway, item, ended[1])
        elif isinstance(item, Infer):
            self._begin(gateway, item)
        elif isinstance(item, Cancel):
            # It overtook its order, which must not start any more.
            self._remember(key, gateway, "cancelled before it came")
        else:
            self._world.counters["unknown_attempt"] += 1

    def _continue(self, attempt: Attempt, item: ToNode) -> None:
        match item:
            case Infer():
                attempt.again()
            case Ack():
                attempt.acknowledge(item.seq)
            case Resend():
                attempt.resend(item.from_seq)
            case Cancel():
                attempt.cancel(item.acked_seq)

    def _begin(self, gateway: GatewayId, infer: Infer) -> None:
        attempt = Attempt(infer, gateway, self._world, self._closed)
        self._live[attempt.key] = attempt
        replica = self._deployments.ready(infer.model)
        if not _sound(infer):
            self._world.counters["malformed"] += 1
            attempt.refuse(Refusal.MALFORMED, "the order is not well formed")
        elif not self.accepting:
            attempt.refuse(Refusal.SHUTTING_DOWN, "the node is about to end")
        elif replica is None:
            attempt.refuse(Refusal.MODEL_NOT_LOADED, "this node does not serve the model now")
        elif replica.queue_depth > parameters.node_queue_max:
            attempt.refuse(Refusal.NODE_BUSY, f"{replica.queue_depth - 1} requests wait already")
        else:
            attempt.begin(replica)
            self._watch()

    def _answer_alike(self, gateway: GatewayId, item: Infer | Resend, end: Done | Failed) -> None:
        if isinstance(item, Infer):
            self._world.outgoing.send(gateway, Accepted(item.request, item.attempt, 0))
        self._world.outgoing.send(gateway, end)

    def _watch(self) -> None:
        """One clock for all attempts, and only while there are any."""
        if not self._watching:
            self._watching = True
            self._world.tasks.start(self._watch_all())

    async def _watch_all(self) -> None:
        try:
            while self._live:
                await self._world.clock.sleep_ms(parameters.attempts_watch_ms)
                now_ms = self._world.clock.now_ms()
                for attempt in list(self._live.values()):
                    self._watch_one(attempt, now_ms)
        finally:
            self._watching = False

    def _watch_one(self, attempt: Attempt, now_ms: int) -> None:
        """A mistake in one attempt must not leave the others unwatched."""
        try:
            attempt.watch(now_ms)
        except Exception:
            self._world.counters["attempt_errors"] += 1
            log.exception("attempt %s of %s", attempt.infer.attempt, attempt.infer.request)
            attempt.drop()
            self._live.pop(attempt.key, None)

    def _closed(self, attempt: Attempt) -> None:
        del self._live[attempt.key]
        assert attempt.end is not None
        self._keep(attempt.key, attempt.gateway, attempt.end)

    def _remember(self, key: Key, gateway: GatewayId, message: str) -> None:
        self._keep(key, gateway, Failed(*key, Refusal.CANCELLED, message))

    def _keep(self, key: Key, gateway: GatewayId, end: Done | Failed) -> None:
        self._ended[key] = (gateway, end)
        if len(self._ended) > parameters.finished_attempts_kept:
            self._ended.popitem(last=False)

    async def drain(self) -> None:
        """Say that it ends, wait a little for the last acknowledgements, then close the books."""
        self.accepting = False
        for attempt in list(self._live.values()):
            if attempt.end is None:
                attempt.fail(Refusal.SHUTTING_DOWN, "the node is about to end")
        clock = self._world.clock
        deadline_ms = clock.now_ms() + parameters.agent_drain_ms
        while self._live and clock.now_ms() < deadline_ms:
            await clock.sleep_ms(parameters.chunk_tick_ms)
        for attempt in list(self._live.values()):
            attempt.interrupt()

    def drop(self) -> None:
        self._dropped = True
        for attempt in list(self._live.values()):
            attempt.drop()
        self._live.clear()


def _sound(infer: Infer) -> bool:
    """Whether the numbers are such that no rule of ours breaks on them."""
    price, sampling = infer.price, infer.sampling
    return (
        infer.attempt >= 1
        # They are repeated on the receipt, whose length is bounded.
        and max(map(len, (infer.request, infer.grant.hold, infer.grant.boot, infer.grant.seal,
                          infer.model))) <= parameters.id_letters_max
        and infer.grant.max_micro >= 0
        and min(price.input_micro_per_mtok, price.output_micro_per_mtok) >= 0
        and 0 <= price.fee_basis_points <= 10_000
        and sampling.max_tokens >= 1
        and len(sampling.stop) <= parameters.stop_sequences_max
        and (sampling.top_logprobs is None
             or 0 <= sampling.top_logprobs <= parameters.top_logprobs_max)
        and len(infer.messages) <= parameters.body_bytes_max
        and infer.first_token_ms > 0
        and infer.total_ms > 0
    )  # fmt: skip
