"""Names for the things the network counts, so that a type checker can tell them apart.

Ids are `<kind>_<ULID>` made by a port; node and gateway ids are derived from a public key, so
that whoever shows the key proves the name.
"""

import base64
import hashlib
from typing import Final, NewType

AccountId = NewType("AccountId", str)
GatewayId = NewType("GatewayId", str)
CoordinatorId = NewType("CoordinatorId", str)
NodeId = NewType("NodeId", str)
KeyId = NewType("KeyId", str)
HoldId = NewType("HoldId", str)
RequestId = NewType("RequestId", str)
ReceiptId = NewType("ReceiptId", str)
TransferId = NewType("TransferId", str)
BootId = NewType("BootId", str)
Digest = NewType("Digest", str)
"""Lower-case hex SHA-256 of the bytes it names."""

ANY_COORDINATOR: Final = CoordinatorId("_")
MINT: Final = AccountId("acc_mint")
"""The contra account: every starting credit is posted from it, so all balances sum to zero."""
POOL: Final = AccountId("acc_pool")
"""Earns the pool's fee."""


def node_id(public_key: bytes) -> NodeId:
    return NodeId("node_" + _fingerprint(public_key))


def gateway_id(public_key: bytes) -> GatewayId:
    return GatewayId("gw_" + _fingerprint(public_key))


def receipt_id(request: RequestId, attempt: int) -> ReceiptId:
    """Known before the attempt ends, because headers leave with the first chunk."""
    return ReceiptId(f"rcp_{request.removeprefix('req_')}_{attempt}")


def _fingerprint(public_key: bytes) -> str:
    """base32(SHA-256(public key)), lower case, without padding: 52 characters."""
    digest = hashlib.sha256(public_key).digest()
    return base64.b32encode(digest).decode().rstrip("=").lower()
