"""The desk for money and questions: each handler loads, decides, records; the outbox tells."""

import asyncio
import logging
from typing import Final

from potluck.coordinator import commands, countersigning, holds, queries, settlement
from potluck.coordinator.mail import Letter
from potluck.coordinator.queries import Live
from potluck.coordinator.settlement import Batch, Outcome
from potluck.coordinator.state import State
from potluck.core import parameters
from potluck.core.ids import GatewayId, HoldId, NodeId
from potluck.core.refusals import Refusal
from potluck.messages.membership import Regreet, Rehello
from potluck.messages.money import (
    Countersignature,
    HoldRelease,
    HoldRenewal,
    HoldReply,
    HoldRequest,
    ReceiptBatch,
)
from potluck.messages.queries import Answer, Command, Query
from potluck.ports.store import StoreFullError, StoreUnavailableError, Tx

log = logging.getLogger(__name__)


class Accounting:
    def __init__(self, state: State) -> None:
        self._state = state

    async def hold(self, letter: Letter, request: HoldRequest) -> HoldReply:
        state = self._state
        grant_key = state.ids.secret(parameters.grant_key_bytes)
        gateway, now_ms = GatewayId(letter.sender), state.clock.wall_ms()
        return await state.store.transact(
            lambda tx: holds.open(tx, request, gateway, letter.boot, grant_key, now_ms)
        )

    async def renew(self, letter: Letter, renewal: HoldRenewal) -> HoldReply:
        gateway, now_ms = GatewayId(letter.sender), self._state.clock.wall_ms()
        return await self._state.store.transact(
            lambda tx: holds.renew(tx, renewal.hold, gateway, letter.boot, now_ms)
        )

    async def release(self, letter: Letter, release: HoldRelease) -> None:
        gateway, now_ms = GatewayId(letter.sender), self._state.clock.wall_ms()
        refusal = await self._state.store.transact(
            lambda tx: holds.release(tx, release.hold, gateway, letter.boot, now_ms)
        )
        if refusal is not None:
            self._state.mail.counters[refusal] += 1

    async def receipts(self, letter: Letter, batch: ReceiptBatch) -> None:
        state, node = self._state, NodeId(letter.sender)
        member = state.roster.members.get(node)
        if member is None:
            state.mail.tell("rehello", node, Rehello())
            return
        proven = settlement.prove(batch, node, member.row.public_key, state.verifier)
        if isinstance(proven, Refusal):
            state.mail.counters[proven] += 1
            return
        try:
            await self._settle(proven)
        except (StoreFullError, StoreUnavailableError):
            raise
        except Exception:
            # One receipt that breaks a rule of the database must not keep its neighbours unpaid.
            if len(proven.receipts) == 1:
                raise
            await self._settle_singly(proven)

    async def _settle_singly(self, batch: Batch) -> None:
        results = await asyncio.gather(
            *(self._settle(one) for one in settlement.singly(batch)), return_exceptions=True
        )
        for proven, result in zip(batch.receipts, results, strict=True):
            if isinstance(result, BaseException):
                self._state.mail.counters["unsettled"] += 1
                log.error("%s of %s cannot be settled", proven.receipt.receipt, batch.node,
                          exc_info=result)  # fmt: skip

    async def _settle(self, batch: Batch) -> None:
        state, now_ms = self._state, self._state.clock.wall_ms()

        def work(tx: Tx) -> list[Outcome]:
            outcomes = settlement.settle(tx, batch, now_ms)
            settlement.tell(tx, state.mail.pool, state.mail.id, batch.node, outcomes)
            return outcomes

        outcomes = await state.store.transact(work)
        state.mail.counters["waiting"] += len(batch.receipts) - len(outcomes)
        for outcome in outcomes:
            if outcome.refusal:
                state.mail.counters[outcome.refusal] += 1
        state.outbox_full.set()

    async def countersign(self, letter: Letter, body: Countersignature) -> None:
        state, gateway = self._state, GatewayId(letter.sender)
        known = state.roster.gateways.get(gateway)
        if known is None:
            state.mail.tell("regreet", gateway, Regreet())
            return
        signed = countersigning.prove(body, gateway, known.public_key, state.verifier)
        if isinstance(signed, Refusal):
            state.mail.counters[signed] += 1
            return
        mail, now_ms = state.mail, state.clock.wall_ms()
        await state.store.transact(
            lambda tx: countersigning.attach(tx, signed, mail.pool, mail.id, now_ms)
        )
        state.outbox_full.set()

    async def query(self, _letter: Letter, query: Query) -> Answer:
        """Waits a little for the offset that is asked for: another coordinator may have made it."""
        clock = self._state.clock
        until_ms = clock.now_ms() + parameters.offset_wait_ms
        pause_ms = parameters.offset_poll_ms
        while True:
            live = self._live()
            answer = await self._state.store.transact(lambda tx: queries.read(tx, query, live))  # noqa: B023
            if answer is not None:
                return answer
            if clock.now_ms() >= until_ms:
                return refused_answer(Refusal.COORDINATOR_UNAVAILABLE)
            await clock.sleep_ms(pause_ms)
            pause_ms *= 2

    async def command(self, _letter: Letter, command: Command) -> Answer:
        state = self._state
        desk = commands.Desk(
            pool=state.mail.pool,
            sender=state.mail.id,
            drawn=commands.draw(state.ids),
            now_ms=state.clock.wall_ms(),
        )
        answer = await state.store.transact(lambda tx: commands.carry_out(tx, command, desk))
        state.outbox_full.set()
        return answer

    def _live(self) -> Live:
        state = self._state
        return Live(
            pool=state.mail.pool,
            coordinator=state.mail.id,
            # A copy: the transaction runs on another thread.
            members=dict(state.roster.members),
            ready_of=state.publisher.ready_of,
            ready=state.publisher.ready,
            frozen=state.watch.frozen,
            books_balance=state.books_balance,
            now_ms=state.clock.now_ms(),
            wall_ms=state.clock.wall_ms(),
        )


def refused_hold(refusal: Refusal) -> HoldReply:
    return holds.refused(NO_HOLD, refusal)


def refused_answer(refusal: Refusal) -> Answer:
    return Answer(refusal=refusal, offset=0, data=b"", message=_MESSAGES.get(refusal, ""))


NO_HOLD: Final = HoldId("")
_MESSAGES: Final = {
    Refusal.COORDINATOR_UNAVAILABLE: "the coordinator cannot answer now",
    Refusal.STORE_FULL: "the coordinator's disk is full: nothing was written",
    Refusal.OVERLOADED: "the coordinator has too much to do",
    Refusal.INTERNAL: "the coordinator failed on this request; its log says why",
}
