"""Writes that people ask for. Each carries an id: a repeat is answered alike, never done twice.

Whether the asker may is the gateway's to judge by its key; what is named here must exist.
"""

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from potluck.coordinator import bootstrap, events, money
from potluck.core import parameters
from potluck.core.ids import MINT, AccountId, CoordinatorId, KeyId, TransferId
from potluck.core.refusals import Refusal
from potluck.messages import envelope, subjects, views
from potluck.messages.membership import Notice
from potluck.messages.queries import Answer, Command
from potluck.ports.ids import Ids
from potluck.ports.store import AccountRow, KeyRow, Tx


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Names and chance, drawn before the transaction, so that it can be run again."""

    ulid: str
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What a command may need beside its own words."""

    pool: str
    sender: CoordinatorId
    drawn: Drawn
    now_ms: int


Result = msgspec.Struct | tuple[Refusal, str]
Handler = Callable[[Tx, dict[str, str], Desk], Result]


def draw(ids: Ids) -> Drawn:
    return Drawn(ulid=ids.ulid(), secret=ids.secret(parameters.api_key_bytes))


def carry_out(tx: Tx, command: Command, desk: Desk) -> Answer:
    if not 0 < len(command.id) <= parameters.id_letters_max:
        return _refused(tx, Refusal.MALFORMED, "the command's id is empty or too long")
    body_hash = hashlib.sha256(
        msgspec.msgpack.encode([command.order, sorted(command.args.items())])
    ).digest()
    known = tx.commands.get(command.id)
    if known is not None:
        if known[0] != body_hash:
            return _refused(tx, Refusal.ID_REUSED, "this id came with another body before")
        return _ANSWER.decode(known[1])
    result = _HANDLERS[command.order](tx, command.args, desk)
    if isinstance(result, tuple):
        return _refused(tx, *result)
    answer = Answer(refusal="", offset=tx.events.last_offset(), data=msgspec.json.encode(result))
    tx.commands.insert(command.id, body_hash, envelope.encode(_kept(answer, result)), desk.now_ms)
    return answer


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _kept(answer: Answer, result: msgspec.Struct) -> Answer:
    """What a repeat is told. An API key is shown once and stored nowhere."""
    if not isinstance(result, views.CreatedKeyView):
        return answer
    hidden = msgspec.structs.replace(result, key="")
    return msgspec.structs.replace(answer, data=msgspec.json.encode(hidden))


def _create_account(tx: Tx, args: dict[str, str], desk: Desk) -> Result:
    name = args.get("name", "").strip()
    if not 0 < len(name) <= parameters.name_letters_max:
        return Refusal.INVALID_REQUEST, "an account needs a name, and not too long a one"
    if tx.accounts.by_name(name) is not None:
        return Refusal.INVALID_REQUEST, f"there is an account named {name!r} already"
    kind = args.get("kind", "person")
    if kind not in ("person", "provider"):
        return Refusal.INVALID_REQUEST, "an account is a person's or a provider's"
    row = AccountRow(
        id=AccountId("acc_" + desk.drawn.ulid),
        name=name,
        kind="person" if kind == "person" else "provider",
        created_ms=desk.now_ms,
    )
    credit_micro = parameters.starting_credit_micro if row.kind == "person" else 0
    bootstrap.create_account(tx, row, credit_micro, TransferId("tr_" + desk.drawn.ulid))
    return account_view(tx, row)


def _create_key(tx: Tx, args: dict[str, str], desk: Desk) -> Result:
    account = tx.accounts.get(AccountId(args.get("account", "")))
    if account is None:
        return Refusal.ACCOUNT_NOT_FOUND, "no such account"
    if account.kind not in ("person", "provider"):
        return Refusal.FORBIDDEN, "this account has no keys"
    expires_ms = _whole(args.get("expires_ms", ""))
    if args.get("expires_ms") and (expires_ms is None or expires_ms <= desk.now_ms):
        return Refusal.INVALID_REQUEST, "expires_ms lies in the past or is no number"
    name = args.get("name", "")
    if len(name) > parameters.name_letters_max:
        return Refusal.INVALID_REQUEST, "the key's name is too long"
    key = "pk_" + base64.urlsafe_b64encode(desk.drawn.secret).decode().rstrip("=")
    row = KeyRow(
        id=KeyId("key_" + desk.drawn.ulid),
        account=account.id,
        name=name,
        hash=key_hash(key),
        admin=args.get("admin", "").lower() in ("true", "1"),
        created_ms=desk.now_ms,
        expires_ms=expires_ms,
        revoked_ms=None,
    )
    tx.keys.insert(row)
    events.record(tx, desk.now_ms, "key_created", row.id, account=account.id)
    return views.CreatedKeyView(
        id=row.id,
        account=row.account,
        name=row.name,
        admin=row.admin,
        expires_ms=expires_ms,
        key=key,
    )


def _revoke_key(tx: Tx, args: dict[str, str], desk: Desk) -> Result:
    row = tx.keys.get(KeyId(args.get("key", "")))
    if row is None or ("account" in args and row.account != args["account"]):
        return Refusal.KEY_NOT_FOUND, "no such key"
    if row.revoked_ms is None:
        tx.keys.revoke(row.id, desk.now_ms)
        events.record(tx, desk.now_ms, "key_revoked", row.id, account=row.account)
    notice = envelope.encode(Notice(kind="key", name=row.hash))
    for gateway in tx.gateways.list():
        subject = subjects.subject(desk.pool, desk.sender, "notice", gateway.id)
        tx.outbox.add(subject, notice)
    revoked = tx.keys.get(row.id)
    assert revoked is not None
    return key_view(revoked)


def _deposit(tx: Tx, args: dict[str, str], desk: Desk) -> Result:
    account = tx.accounts.get(AccountId(args.get("account", "")))
    if account is None:
        return Refusal.ACCOUNT_NOT_FOUND, "no such account"
    if account.id == MINT:
        return Refusal.FORBIDDEN, "the mint pays, it is not paid"
    amount_micro = _whole(args.get("amount_micro", ""))
    if amount_micro is None or not 0 < amount_micro <= parameters.amount_micro_max:
        return Refusal.INVALID_REQUEST, "amount_micro is not a positive whole number"
    money.post(
        tx,
        id=TransferId("tr_" + desk.drawn.ulid),
        kind="deposit",
        payer=MINT,
        payee=account.id,
        amount_micro=amount_micro,
        cause=account.id,
        hold=None,
        at_ms=desk.now_ms,
        overdraft=True,
    )
    events.record(tx, desk.now_ms, "deposited", account.id, amount_micro=amount_micro)
    return account_view(tx, account)


_HANDLERS: dict[str, Handler] = {
    "create_account": _create_account,
    "create_key": _create_key,
    "revoke_key": _revoke_key,
    "deposit": _deposit,
}
_ANSWER = msgspec.msgpack.Decoder(Answer)


def account_view(tx: Tx, row: AccountRow) -> views.AccountView:
    balance = tx.balances.get(row.id)
    return views.AccountView(
        id=row.id,
        name=row.name,
        kind=row.kind,
        posted_micro=balance.posted_micro,
        pending_micro=balance.pending_micro,
        available_micro=balance.available_micro,
        created_ms=row.created_ms,
    )


def key_view(row: KeyRow) -> views.KeyView:
    return views.KeyView(
        id=row.id,
        account=row.account,
        name=row.name,
        admin=row.admin,
        created_ms=row.created_ms,
        expires_ms=row.expires_ms,
        revoked_ms=row.revoked_ms,
    )


def _refused(tx: Tx, refusal: Refusal, message: str) -> Answer:
    return Answer(refusal=refusal, offset=tx.events.last_offset(), data=b"", message=message)


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else None


_DIGITS_MAX = 18
