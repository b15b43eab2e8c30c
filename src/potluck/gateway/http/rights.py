"""What a key may see and do in the native API: an admin's all, others' only their own."""

import msgspec

from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.gateway.http.errors import Problem, ProblemError
from potluck.messages.queries import KeyRecord
from potluck.messages.views import KeyView


class _Keys(msgspec.Struct):
    data: list[KeyView]


def scope(who: KeyRecord, account: str | None) -> dict[str, str]:
    """Whose things are listed: an admin's choice or all, others' only their own."""
    if account is not None:
        own(who, account)
        return {"account": account}
    return mine(who)


def mine(who: KeyRecord) -> dict[str, str]:
    """The coordinator then answers as if others' things did not exist."""
    return {} if who.admin else {"account": who.account}


def own(who: KeyRecord, account: str) -> None:
    if not who.admin and account != who.account:
        raise ProblemError(Problem(Refusal.FORBIDDEN, param="account"))


def admin(who: KeyRecord) -> None:
    if not who.admin:
        raise ProblemError(Problem(Refusal.FORBIDDEN, "This needs an admin's key."))


def life_ms(who: KeyRecord, asked_s: int | None) -> int | None:
    """How long a new key lives: no key makes one that outlives itself, an admin's excepted."""
    asked_ms = None if asked_s is None else asked_s * 1000
    if who.admin or who.lives_ms is None:
        return asked_ms
    if asked_ms is None:
        return max(1, who.lives_ms)
    if asked_ms > who.lives_ms:
        message = "A key cannot make one that outlives itself."
        raise ProblemError(Problem(Refusal.FORBIDDEN, message, "life_s"))
    return asked_ms


def revoke(who: KeyRecord, key: KeyView) -> None:
    if key.admin and not who.admin:
        raise ProblemError(Problem(Refusal.FORBIDDEN, "An admin's key is revoked by another."))


def find_key(listed: bytes, key: str) -> KeyView:
    """Among the keys of an account, as a coordinator lists them."""
    for found in msgspec.json.decode(listed, type=_Keys).data:
        if found.id == key:
            return found
    raise ProblemError(Problem(Refusal.KEY_NOT_FOUND))


def idempotency_key(shown: str | None) -> str | None:
    """The client's word for one write, or the problem with it."""
    if shown is None:
        return None
    fits = 0 < len(shown) <= parameters.idempotency_key_letters_max
    if not (fits and shown.isascii() and shown.isprintable()):
        most = parameters.idempotency_key_letters_max
        message = f"An idempotency key has 1 to {most} printable ASCII letters."
        raise ProblemError(Problem(Refusal.INVALID_REQUEST, message, "idempotency-key"))
    return shown
