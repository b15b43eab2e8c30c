"""Standing holds: opened, renewed, released. Money is set aside in the same transaction.

Rule: a gateway speaks for its own holds of its present start, and for no others.
"""

from potluck.coordinator import events
from potluck.core import holds, ledger, parameters
from potluck.core.holds import Hold
from potluck.core.ids import BootId, GatewayId, HoldId
from potluck.core.refusals import Refusal
from potluck.messages.money import HoldReply, HoldRequest
from potluck.ports.store import HoldRow, Tx


def refused(hold: HoldId, refusal: Refusal) -> HoldReply:
    return HoldReply(hold=hold, amount_micro=0, life_ms=0, grant_key=b"", refusal=refusal)


def open(
    tx: Tx, request: HoldRequest, gateway: GatewayId, boot: BootId, grant_key: bytes, now_ms: int
) -> HoldReply:
    if not _plausible(request):
        return refused(HoldId(""), Refusal.MALFORMED)
    known = tx.holds.get(request.hold)
    if known is not None:
        return _again(known, request, gateway, boot, now_ms)
    account = tx.accounts.get(request.account)
    if account is None:
        return refused(request.hold, Refusal.ACCOUNT_NOT_FOUND)
    if account.kind not in ("person", "provider"):
        return refused(request.hold, Refusal.FORBIDDEN)
    if len(tx.holds.open_of(account.id)) >= parameters.holds_per_account_max:
        return refused(request.hold, Refusal.TOO_MANY_HOLDS)
    balance = tx.balances.get(account.id)
    amount_micro = holds.size(request.want_micro, balance.available_micro)
    if isinstance(amount_micro, Refusal):
        return refused(request.hold, amount_micro)
    if amount_micro < request.need_micro:
        return refused(request.hold, Refusal.INSUFFICIENT_FUNDS)
    after = ledger.set_aside(balance, amount_micro)
    assert not isinstance(after, Refusal)
    tx.balances.put(account.id, after)
    hold = Hold(
        id=request.hold,
        account=account.id,
        gateway=gateway,
        boot=boot,
        amount_micro=amount_micro,
        expires_ms=now_ms + parameters.hold_life_ms,
    )
    row = HoldRow(hold=hold, want_micro=request.want_micro, grant_key=grant_key, opened_ms=now_ms)
    tx.holds.insert(row)
    events.record(tx, now_ms, "hold_opened", hold.id, account=account.id, amount_micro=amount_micro)
    return _reply(row, now_ms)


def renew(tx: Tx, id: HoldId, gateway: GatewayId, boot: BootId, now_ms: int) -> HoldReply:
    row = tx.holds.get(id)
    if row is None:
        return refused(id, Refusal.UNKNOWN_HOLD)
    if row.hold.gateway != gateway:
        return refused(id, Refusal.FORGED)
    if row.hold.boot != boot:
        return refused(id, Refusal.UNKNOWN_HOLD)
    after = holds.renew(row.hold, now_ms)
    if isinstance(after, Refusal):
        return refused(id, after)
    tx.holds.update(after)
    return HoldReply(
        hold=id,
        amount_micro=after.amount_micro,
        life_ms=after.expires_ms - now_ms,
        grant_key=row.grant_key,
    )


def release(tx: Tx, id: HoldId, gateway: GatewayId, boot: BootId, now_ms: int) -> Refusal | None:
    """The gateway that owns it says that nothing can be owed on it any more."""
    row = tx.holds.get(id)
    if row is None:
        return Refusal.UNKNOWN_HOLD
    if row.hold.gateway != gateway or row.hold.boot != boot:
        return Refusal.FORGED
    if row.hold.state == "open":
        void(tx, row.hold)
        events.record(
            tx, now_ms, "hold_released", id,
            account=row.hold.account, rest_micro=row.hold.rest_micro,
        )  # fmt: skip
    return None


def void(tx: Tx, hold: Hold) -> None:
    """Gives back what was set aside and not settled."""
    balance = tx.balances.get(hold.account)
    tx.balances.put(hold.account, ledger.release(balance, hold.rest_micro))
    tx.holds.update(holds.void(hold))


def _again(
    row: HoldRow, request: HoldRequest, gateway: GatewayId, boot: BootId, now_ms: int
) -> HoldReply:
    """The same id with the same body is answered the same; anything else is refused."""
    hold = row.hold
    if hold.gateway != gateway:
        return refused(request.hold, Refusal.FORGED)
    same = (hold.account, row.want_micro, hold.boot) == (request.account, request.want_micro, boot)
    if not same or hold.amount_micro < request.need_micro:
        return refused(request.hold, Refusal.ID_REUSED)
    if hold.state != "open":
        return refused(request.hold, Refusal.HOLD_VOIDED)
    return _reply(row, now_ms)


def _reply(row: HoldRow, now_ms: int) -> HoldReply:
    return HoldReply(
        hold=row.hold.id,
        amount_micro=row.hold.amount_micro,
        life_ms=max(0, row.hold.expires_ms - now_ms),
        grant_key=row.grant_key,
    )


def _plausible(request: HoldRequest) -> bool:
    amounts = 0 <= request.need_micro <= request.want_micro <= parameters.amount_micro_max
    named = request.hold.startswith("hold_") and len(request.hold) <= parameters.id_letters_max
    return amounts and request.want_micro > 0 and named
