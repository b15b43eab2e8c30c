"""Who asks: an `Authorization: Bearer pk_...` header to a key's record, or a refusal."""

import re
from typing import Final

from potluck.core.refusals import Refusal
from potluck.gateway.serving.serving import Serving, key_digest
from potluck.messages.queries import KeyRecord

_BEARER: Final = re.compile(rb"(?i:bearer) +(pk_[A-Za-z0-9_-]{43})")


def digest_in(authorization: bytes) -> str:
    """Hex SHA-256 of the shown key; empty if none of the right shape was shown."""
    shown = _BEARER.fullmatch(authorization)
    return key_digest(shown.group(1)) if shown else ""


async def who(serving: Serving, authorization: bytes) -> KeyRecord | Refusal:
    digest = digest_in(authorization)
    if not digest:
        return Refusal.INVALID_KEY
    known = serving.key_cached(digest)
    return await serving.keys.find(digest) if known is None else known
