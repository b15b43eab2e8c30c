"""Standing holds in memory: a request pays from them without waiting for a disk.

Rule: each hold keeps amount = settled + outstanding + granted + free (core/grants), and money is
asked for once at a time for each account, whoever waits.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from potluck.core import grants, parameters
from potluck.core.grants import Purse
from potluck.core.ids import ANY_COORDINATOR, AccountId, HoldId, RequestId
from potluck.core.refusals import Refusal
from potluck.gateway.serving.speech import Speech
from potluck.messages import money
from potluck.messages.money import HoldRelease, HoldRenewal, HoldReply, HoldRequest, Settled
from potluck.ports.clock import Clock
from potluck.ports.ids import Ids

Attempt = tuple[RequestId, int]


@dataclass
class Held:
    """One hold: its purse, the key that seals grants on it, and what waits for settlement."""

    account: AccountId
    purse: Purse
    key: bytes
    life_ms: int
    renewed_ms: int
    used_ms: int
    refused: bool = False
    """The coordinator no longer knows it: nothing more is drawn."""
    renewing: bool = False
    expected_micro: dict[Attempt, int] = field(default_factory=dict)
    early_micro: dict[Attempt, int] = field(default_factory=dict)
    """Settled before we closed the attempt (its node gave up waiting for us)."""

    def drawable(self, now_ms: int) -> bool:
        return not self.refused and now_ms < self.renewed_ms + self.life_ms

    def draw(self, max_micro: int, now_ms: int) -> bool:
        after = grants.draw(self.purse, max_micro)
        if isinstance(after, Refusal):
            return False
        self.purse = after
        self.used_ms = now_ms
        return True

    def close(self, attempt: Attempt, *, max_micro: int, used_micro: int) -> None:
        self.purse = grants.close(self.purse, max_micro=max_micro, used_micro=used_micro)
        if used_micro:
            self.expected_micro[attempt] = used_micro
        early_micro = self.early_micro.pop(attempt, None)
        if early_micro is not None:
            self.settle(attempt, early_micro)

    def settle(self, attempt: Attempt, settled_micro: int) -> None:
        expected_micro = self.expected_micro.pop(attempt, None)
        if expected_micro is not None:
            self.purse = grants.settled(
                self.purse, expected_micro=expected_micro, settled_micro=max(0, settled_micro)
            )


class Purses:
    def __init__(self, speech: Speech, clock: Clock, ids: Ids) -> None:
        self._speech = speech
        self._clock = clock
        self._ids = ids
        self._by_account: dict[AccountId, list[Held]] = {}
        self._by_hold: dict[HoldId, Held] = {}
        self._opening: dict[AccountId, asyncio.Task[tuple[int, Refusal | None]]] = {}
        self._no_top_up_before_ms: dict[AccountId, int] = {}
        self._renewals: set[asyncio.Task[None]] = set()

    def all(self) -> list[Held]:
        return list(self._by_hold.values())

    def draw(self, account: AccountId, max_micro: int, now_ms: int) -> Held | None:
        """A hold from which `max_micro` was set aside; None: `fund` first."""
        held_by_account = self._by_account.get(account, ())
        free_micro = 0
        drawn = None
        for held in held_by_account:
            if held.drawable(now_ms):
                if drawn is None and held.draw(max_micro, now_ms):
                    drawn = held
                free_micro += held.purse.free_micro
        if drawn is not None and free_micro < parameters.hold_block_micro // 2:
            self._top_up(account, now_ms)
        return drawn

    async def fund(self, account: AccountId, need_micro: int) -> Refusal | None:
        """Opens a hold with at least `need_micro`, together with others who wait for the account.

        `INSUFFICIENT_FUNDS`, `TOO_MANY_HOLDS`, or `COORDINATOR_UNAVAILABLE` after the reply's
        timeout. None: try to draw again.
        """
        while True:
            task = self._opening.get(account) or self._open_soon(account, need_micro)
            asked_micro, refusal = await asyncio.shield(task)
            if refusal is Refusal.INSUFFICIENT_FUNDS and asked_micro > need_micro:
                continue  # Somebody else asked for more than there is; less may be there.
            return refusal

    def settled(self, told: Settled, is_live: Callable[[RequestId, int], bool]) -> None:
        held = self._by_hold.get(told.hold)
        if held is None:
            return
        expected_sum = settled_sum = 0
        for item in told.items:
            attempt = (item.request, item.attempt)
            expected_micro = held.expected_micro.pop(attempt, None)
            if expected_micro is not None:
                expected_sum += expected_micro
                settled_sum += max(0, min(item.total_micro, expected_micro))
            elif is_live(item.request, item.attempt):
                held.early_micro[attempt] = item.total_micro
        held.purse = grants.settled(
            held.purse, expected_micro=expected_sum, settled_micro=settled_sum
        )

    def tick(self, now_ms: int) -> None:
        """Renews what is in use, releases what was idle for a whole life."""
        for account, until_ms in list(self._no_top_up_before_ms.items()):
            if now_ms >= until_ms:
                del self._no_top_up_before_ms[account]
        for held in list(self._by_hold.values()):
            unused = now_ms - held.used_ms >= parameters.hold_life_ms
            ended = held.refused or not held.drawable(now_ms)
            if held.purse.idle and (unused or ended):
                self._release(held)
            elif ended and held.purse.granted_micro == 0:
                self._forget(held)  # What is outstanding settles, or is voided after the grace.
            elif ended or unused or held.renewing:
                continue
            elif now_ms - held.renewed_ms >= parameters.hold_renewal_ms:
                held.renewing = True
                self._keep_task(asyncio.create_task(self._renew(held)))

    async def stop(self) -> None:
        """Gives back what nothing is owed on; the rest is voided by its life and grace."""
        for task in (*self._opening.values(), *self._renewals):
            task.cancel()
        for held in list(self._by_hold.values()):
            if held.purse.idle:
                self._release(held)

    def _keep_task(self, task: "asyncio.Task[None]") -> None:
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)

    def _top_up(self, account: AccountId, now_ms: int) -> None:
        if account in self._opening or now_ms < self._no_top_up_before_ms.get(account, 0):
            return
        self._open_soon(account, 1)

    def _open_soon(
        self, account: AccountId, need_micro: int
    ) -> "asyncio.Task[tuple[int, Refusal | None]]":
        task = asyncio.create_task(self._open(account, need_micro))
        self._opening[account] = task
        task.add_done_callback(lambda _done: self._opening.pop(account, None))
        return task

    async def _open(self, account: AccountId, need_micro: int) -> tuple[int, Refusal | None]:
        refusal = await self._ask_hold(account, need_micro)
        if refusal is Refusal.INSUFFICIENT_FUNDS and self._release_idle(account):
            # Change left in several holds may be enough once it is in one.
            refusal = await self._ask_hold(account, need_micro)
        if refusal is None:
            self._no_top_up_before_ms.pop(account, None)
        else:
            pause_ms = parameters.hold_top_up_pause_ms
            self._no_top_up_before_ms[account] = self._clock.now_ms() + pause_ms
        return need_micro, refusal

    async def _ask_hold(self, account: AccountId, need_micro: int) -> Refusal | None:
        hold = HoldId("hold_" + self._ids.ulid())
        question = HoldRequest(
            hold=hold,
            account=account,
            want_micro=max(parameters.hold_block_micro, need_micro),
            need_micro=need_micro,
        )
        body = await self._speech.ask_again("hold", question, parameters.hold_reply_timeout_ms)
        reply = _reply(body)
        if reply is None:
            # It may have been opened all the same; a release of an unknown hold is harmless.
            self._speech.tell("release", ANY_COORDINATOR, HoldRelease(hold=hold))
            return Refusal.COORDINATOR_UNAVAILABLE
        if reply.refusal:
            return _refusal(reply.refusal)
        if reply.hold != hold or reply.amount_micro < need_micro or reply.life_ms <= 0:
            return Refusal.INTERNAL
        now_ms = self._clock.now_ms()
        held = Held(
            account=account,
            purse=grants.opened(hold, reply.amount_micro),
            key=reply.grant_key,
            life_ms=reply.life_ms,
            renewed_ms=now_ms,
            used_ms=now_ms,
        )
        self._by_hold[hold] = held
        self._by_account.setdefault(account, []).append(held)
        return None

    async def _renew(self, held: Held) -> None:
        try:
            body = await self._speech.ask(
                "renew", HoldRenewal(hold=held.purse.hold), parameters.hold_reply_timeout_ms
            )
            reply = _reply(body)
            if reply is None:
                return
            if reply.refusal:
                held.refused = True
            else:
                held.renewed_ms = self._clock.now_ms()
                held.life_ms = reply.life_ms
        finally:
            held.renewing = False

    def _release_idle(self, account: AccountId) -> bool:
        idle = [held for held in self._by_account.get(account, ()) if held.purse.idle]
        for held in idle:
            self._release(held)
        return bool(idle)

    def _release(self, held: Held) -> None:
        self._speech.tell("release", ANY_COORDINATOR, HoldRelease(hold=held.purse.hold))
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self._by_hold.pop(held.purse.hold, None)
        rest = [one for one in self._by_account.get(held.account, ()) if one is not held]
        if rest:
            self._by_account[held.account] = rest
        else:
            self._by_account.pop(held.account, None)


def _reply(body: memoryview | None) -> HoldReply | None:
    if body is None:
        return None
    try:
        return money.hold_reply_decoder.decode(body)
    except msgspec.DecodeError:
        return None


def _refusal(code: str) -> Refusal:
    try:
        return Refusal(code)
    except ValueError:
        return Refusal.INTERNAL
