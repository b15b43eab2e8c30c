"""Writes that people ask for. Each carries an id: a repeat is answered alike, never done twice.

Whether the asker may is the gateway's to judge by its key; what is named here must exist. An API
key itself never comes here: the gateway draws it and sends its hash.
"""

import hashlib
import re
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
    return Drawn(ulid=ids.ulid())


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
    tx.commands.insert(command.id, body_hash, envelope.encode(answer), desk.now_ms)
    return answer


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
    life_ms = _whole(args["life_ms"]) if args.get("life_ms") else None
    if args.get("life_ms") and not life_ms:
        return Refusal.INVALID_REQUEST, "life_ms is not a positive whole number"
    name, digest = args.get("name", ""), args.get("hash", "")
    if len(name) > parameters.name_letters_max:
        return Refusal.INVALID_REQUEST, "the key's name is too long"
    if _HASH.fullmatch(digest) is None or tx.keys.by_hash(digest) is not None:
        return Refusal.INVALID_REQUEST, "hash is no hex SHA-256, or that of a key that exists"
    if tx.keys.live_of(account.id, desk.now_ms) >= parameters.keys_per_account_max:
        return Refusal.INVALID_REQUEST, (
            f"an account has at most {parameters.keys_per_account_max} valid keys: revoke one first"
        )
    tx.keys.forget_dead_of(account.id, desk.now_ms, parameters.keys_kept_per_account_max)
    row = KeyRow(
        id=KeyId("key_" + desk.drawn.ulid),
        account=account.id,
        name=name,
        hash=digest,
        admin=args.get("admin", "").lower() in ("true", "1"),
        created_ms=desk.now_ms,
        expires_ms=None if life_ms is None else desk.now_ms + life_ms,
        revoked_ms=None,
    )
    tx.keys.insert(row)
    events.record(tx, desk.now_ms, "key_created", row.id, account=account.id)
    return key_view(row)


def _revoke_key(tx: Tx, args: dict[str, str], desk: Desk) -> Result:
    row = tx.keys.get(KeyId(args.get("key", "")))
    if row is None or ("account" in args and row.account != args["account"]):
        return Refusal.KEY_NOT_FOUND, "no such key"
    lasting = row.admin and row.revoked_ms is None and row.expires_ms is None
    if lasting and tx.keys.lasting_admins() <= 1:
        return Refusal.FORBIDDEN, "this is the last key that may administer for ever: it stays"
    if row.revoked_ms is None:
        tx.keys.revoke(row.id, desk.now_ms)
        events.record(tx, desk.now_ms, "key_revoked", row.id, account=row.account)
    notice = envelope.encode(Notice(kind="key", name=row.hash))
    for gateway in tx.gateways.list():
        if desk.now_ms - gateway.seen_ms >= parameters.gateway_forgotten_ms:
            continue  # What it had cached is long stale.
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


_DIGITS_MAX = 15
_HASH = re.compile("[0-9a-f]{64}")
