"""Who may say what: NATS users whose JWTs name their subjects, minted here.

The chain is operator → account → user (NATS decentralized JWT auth, ADR-14 of the NATS project).
Keys lie in one folder, mode 0600; whoever reads them owns the pool.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys

from potluck.adapters.keys import write_private
from potluck.core import parameters
from potluck.core.ids import ANY_COORDINATOR
from potluck.messages import subjects
from potluck.messages.subjects import Verb

_PREFIXES = {
    "operator": nkeys.PREFIX_BYTE_OPERATOR,
    "system": nkeys.PREFIX_BYTE_ACCOUNT,
    "account": nkeys.PREFIX_BYTE_ACCOUNT,
    "signing": nkeys.PREFIX_BYTE_ACCOUNT,
}
_UNLIMITED = -1
_LIMITED = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
_ACCOUNT_LIMITS = {**dict.fromkeys(_LIMITED, _UNLIMITED), "wildcards": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Subjects one may publish to and subscribe to."""

    publish: Sequence[str]
    subscribe: Sequence[str]


def gateway_rights(pool: str, identity: str) -> Rights:
    """Orders to nodes, questions and words to coordinators; its own ear and inbox."""
    return _member(
        pool,
        identity,
        to_peers=("serve",),
        to_coordinators=(
            "greet", "hold", "renew", "release", "countersign", "query", "command",
        ),
    )  # fmt: skip


def node_rights(pool: str, identity: str) -> Rights:
    """Frames to gateways, presence and receipts to coordinators; its own ear and inbox."""
    return _member(
        pool,
        identity,
        to_peers=("frames",),
        to_coordinators=("hello", "heartbeat", "bye", "receipts"),
    )


def _member(
    pool: str, identity: str, *, to_peers: Sequence[Verb], to_coordinators: Sequence[Verb]
) -> Rights:
    mine = [subjects.subject(pool, identity, verb, "*") for verb in to_peers]
    asked = [subjects.to_coordinator(pool, identity, verb) for verb in to_coordinators]
    return Rights(
        publish=(*mine, *asked),
        subscribe=_ear(pool, identity),
    )


def _ear(pool: str, identity: str) -> tuple[str, ...]:
    return (subjects.received_by(pool, identity), f"{subjects.inbox_prefix(identity)}.>")


def coordinator_rights(pool: str, identity: str) -> Rights:
    """All verbs under its own name, what is said to any coordinator, and the right to answer."""
    return Rights(
        publish=(subjects.sent_by(pool, identity), "_INBOX.>"),
        subscribe=(*_ear(pool, identity), subjects.received_by(pool, ANY_COORDINATOR)),
    )


class Authority:
    """Mints users. Raises `OSError` if its folder cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self._pairs = {name: _load_or_create(folder / f"{name}.nk", prefix)
                       for name, prefix in _PREFIXES.items()}  # fmt: skip

    @property
    def system_account(self) -> str:
        return _public(self._pairs["system"])

    @property
    def account(self) -> str:
        return _public(self._pairs["account"])

    def operator_jwt(self) -> str:
        operator = self._pairs["operator"]
        claims = {"type": "operator", "system_account": self.system_account}
        return _mint(operator, _public(operator), "potluck", claims)

    def account_jwts(self) -> dict[str, str]:
        """Public key → JWT of the system account and the pool's."""
        operator = self._pairs["operator"]
        plain = {"type": "account", "limits": _ACCOUNT_LIMITS}
        signing = {**plain, "signing_keys": [_public(self._pairs["signing"])]}
        return {
            self.system_account: _mint(operator, self.system_account, "system", plain),
            self.account: _mint(operator, self.account, "pool", signing),
        }

    def member(self, identity: str, rights: Rights) -> bytes:
        """A credentials file (JWT and seed) for a new user key that may use `rights`."""
        claims = {
            "type": "user",
            "issuer_account": self.account,
            "pub": {"allow": list(rights.publish)},
            "sub": {"allow": list(rights.subscribe)},
        }
        return self._user("signing", identity, claims)

    def observer(self, identity: str) -> bytes:
        """A credentials file for the system account: hears who connects and leaves."""
        allowed = ["$SYS.ACCOUNT.*.DISCONNECT", "_INBOX.>"]
        claims = {"type": "user", "pub": {"deny": [">"]}, "sub": {"allow": allowed}}
        return self._user("system", identity, claims)

    def _user(self, issuer: str, identity: str, claims: dict[str, Any]) -> bytes:
        pair = nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)))
        # Nobody fills the server's memory with ears; the size of a message is the server's limit.
        limits = {
            "subs": parameters.bus_subscriptions_max, "data": _UNLIMITED, "payload": _UNLIMITED,
        }  # fmt: skip
        jwt = _mint(self._pairs[issuer], _public(pair), identity, {**claims, **limits})
        return _credentials_file(jwt, bytes(pair.seed).decode())


def name_in(jwt: str) -> str:
    """The identity a user's JWT was minted for. Does not verify: for JWTs the server passed on."""
    claims = jwt.split(".")[1]
    decoded = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    return str(decoded["name"])


def _load_or_create(path: Path, prefix: int) -> nkeys.KeyPair:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, bytes(nkeys.encode_seed(os.urandom(32), prefix)))
    return nkeys.from_seed(bytearray(path.read_bytes()))


def _public(pair: nkeys.KeyPair) -> str:
    key: bytes = pair.public_key
    return key.decode()


def _mint(issuer: nkeys.KeyPair, subject: str, name: str, nats: dict[str, Any]) -> str:
    claims: dict[str, Any] = {
        "iss": _public(issuer),
        "sub": subject,
        # A day early: clocks of two machines differ.
        "iat": int(time.time()) - 86_400,
        "name": name,
        "nats": {**nats, "version": 2},
    }
    digest = hashlib.sha256(json.dumps(claims).encode()).digest()
    claims["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    signed = f"{_base64(json.dumps(head).encode())}.{_base64(json.dumps(claims).encode())}"
    return f"{signed}.{_base64(issuer.sign(signed.encode()))}"


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _credentials_file(jwt: str, seed: str) -> bytes:
    """The layout that every NATS client reads."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    ).encode()
