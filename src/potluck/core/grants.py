"""How a gateway spends a standing hold without waiting for a disk.

Rule: amount = settled + outstanding + granted + free, at every moment. A grant reserves what one
request may cost at most; its close turns what was used into *outstanding* until the coordinator
says it is settled.
"""

import hmac
from dataclasses import dataclass

from potluck.core.ids import BootId, HoldId, NodeId, RequestId
from potluck.core.pricing import Price
from potluck.core.refusals import Refusal

SEAL_BYTES = 16


@dataclass(kw_only=True)
class Purse:
    """A standing hold in a gateway's memory.

    Never changed in place; not frozen, because three are made for each request and a frozen one
    takes three times as long.
    """

    hold: HoldId
    amount_micro: int
    free_micro: int
    granted_micro: int = 0
    outstanding_micro: int = 0
    settled_micro: int = 0

    def __post_init__(self) -> None:
        parts = self.free_micro + self.granted_micro + self.outstanding_micro + self.settled_micro
        assert parts == self.amount_micro, "a purse lost or made money"
        assert self.free_micro >= 0
        assert self.granted_micro >= 0
        assert self.outstanding_micro >= 0

    @property
    def idle(self) -> bool:
        return self.granted_micro == 0 and self.outstanding_micro == 0


def opened(hold: HoldId, amount_micro: int) -> Purse:
    return Purse(hold=hold, amount_micro=amount_micro, free_micro=amount_micro)


def draw(purse: Purse, max_micro: int) -> Purse | Refusal:
    assert max_micro >= 0
    if purse.free_micro < max_micro:
        return Refusal.INSUFFICIENT_FUNDS
    return Purse(
        hold=purse.hold,
        amount_micro=purse.amount_micro,
        free_micro=purse.free_micro - max_micro,
        granted_micro=purse.granted_micro + max_micro,
        outstanding_micro=purse.outstanding_micro,
        settled_micro=purse.settled_micro,
    )


def close(purse: Purse, *, max_micro: int, used_micro: int) -> Purse:
    """The request ended: what it used waits for settlement, the rest is free again."""
    assert 0 <= used_micro <= max_micro <= purse.granted_micro
    return Purse(
        hold=purse.hold,
        amount_micro=purse.amount_micro,
        free_micro=purse.free_micro + max_micro - used_micro,
        granted_micro=purse.granted_micro - max_micro,
        outstanding_micro=purse.outstanding_micro + used_micro,
        settled_micro=purse.settled_micro,
    )


def settled(purse: Purse, *, expected_micro: int, settled_micro: int) -> Purse:
    """The coordinator committed. What it settled below our expectation is free again.

    It can never settle above: the lower of two claims is settled.
    """
    assert 0 <= expected_micro <= purse.outstanding_micro
    taken_micro = min(settled_micro, expected_micro)
    return Purse(
        hold=purse.hold,
        amount_micro=purse.amount_micro,
        free_micro=purse.free_micro + expected_micro - taken_micro,
        granted_micro=purse.granted_micro,
        outstanding_micro=purse.outstanding_micro - expected_micro,
        settled_micro=purse.settled_micro + taken_micro,
    )


def seal(
    key: bytes, *, request: RequestId, attempt: int, node: NodeId, hold: HoldId, boot: BootId,
    max_micro: int, bill_prompt: bool, price: Price,
) -> bytes:  # fmt: skip
    """HMAC-SHA-256 (RFC 2104), cut to 16 bytes, under a key that gateway and coordinator share.

    A node can thus claim money for work it was given, and for no other.
    """
    words = (
        f"grant|{request}|{attempt}|{node}|{hold}|{boot}|{max_micro}|{bill_prompt:d}|"
        f"{price.input_micro_per_mtok}|{price.output_micro_per_mtok}|{price.fee_basis_points}"
    )
    return hmac.digest(key, words.encode(), "sha256")[:SEAL_BYTES]


def sealed(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)
