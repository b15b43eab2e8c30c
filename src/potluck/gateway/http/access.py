"""Who asks: an `Authorization: Bearer pk_...` header to a key's record, or a refusal.

Rule: a key is 32 random bytes; only the SHA-256 of its letters leaves this process.
"""

import base64
import hashlib
import re
from typing import Final

import msgspec

from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.gateway.serving.serving import Serving
from potluck.messages.queries import KeyRecord
from potluck.ports.ids import Ids

_BEARER: Final = re.compile(rb"(?i:bearer) +(pk_[A-Za-z0-9_-]{43})")


def draw(ids: Ids) -> str:
    secret = base64.urlsafe_b64encode(ids.secret(parameters.api_key_bytes))
    return "pk_" + secret.decode().rstrip("=")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def digest_in(authorization: bytes) -> str:
    """Hex SHA-256 of the shown key; empty if none of the right shape was shown."""
    shown = _BEARER.fullmatch(authorization)
    return hashlib.sha256(shown.group(1)).hexdigest() if shown else ""


async def who(serving: Serving, authorization: bytes) -> KeyRecord | Refusal:
    """With `lives_ms` as of now."""
    shown = digest_in(authorization)
    if not shown:
        return Refusal.INVALID_KEY
    known = serving.key_cached(shown) or await serving.keys.find(shown)
    if isinstance(known, KeyRecord) and known.lives_ms is not None:
        return msgspec.structs.replace(known, lives_ms=serving.keys.left_ms(shown))
    return known
