"""Tables for pricing, ledger, holds, grants and receipts: (state, event) → (state, effect)."""

import pytest

from potluck.core import grants, holds, ledger, parameters, pricing, receipts
from potluck.core.grants import Purse
from potluck.core.holds import Hold
from potluck.core.ids import AccountId, BootId, GatewayId, HoldId, NodeId, RequestId
from potluck.core.ledger import Balance
from potluck.core.pricing import Cost, Price
from potluck.core.receipts import Claim
from potluck.core.refusals import Refusal

PRICE = Price(input_micro_per_mtok=400_000, output_micro_per_mtok=2_000_000, fee_basis_points=1_000)
H = HoldId("hold_1")


def balance(posted: int, pending: int = 0) -> Balance:
    return Balance(posted_micro=posted, pending_micro=pending)


def cost(provider: int, fee: int) -> Cost:
    return Cost(provider_micro=provider, fee_micro=fee)


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        (40, 8, cost(32, 3)),
        (0, 0, cost(0, 0)),
        (0, 1, cost(2, 0)),
        (1, 0, cost(0, 0)),
        (1_000_000, 1_000_000, cost(2_400_000, 240_000)),
        (5, 0, cost(2, 0)),
    ],
)
def test_cost(prompt: int, completion: int, expected: Cost) -> None:
    assert pricing.cost(PRICE, prompt_tokens=prompt, completion_tokens=completion) == expected


@pytest.mark.parametrize(
    ("numerator", "denominator", "expected"),
    [(1, 2, 0), (3, 2, 2), (5, 2, 2), (7, 2, 4), (2, 3, 1), (1, 3, 0), (0, 7, 0), (14, 7, 2)],
)
def test_half_even(numerator: int, denominator: int, expected: int) -> None:
    assert pricing.divide_half_even(numerator, denominator) == expected


def test_the_most_a_request_may_cost() -> None:
    assert pricing.cost_max_micro(PRICE, prompt_bytes=96, completion_tokens_max=64) == 212


@pytest.mark.parametrize(
    ("max_micro", "expected"),
    [(35, cost(32, 3)), (100, cost(32, 3)), (34, cost(31, 3)), (20, cost(18, 2)), (0, cost(0, 0))],
)
def test_capped(max_micro: int, expected: Cost) -> None:
    assert pricing.capped(cost(32, 3), max_micro, PRICE) == expected


@pytest.mark.parametrize(
    ("before", "amount", "after"),
    [
        (balance(100), 100, balance(100, 100)),
        (balance(100, 60), 40, balance(100, 100)),
        (balance(100, 60), 41, Refusal.INSUFFICIENT_FUNDS),
        (balance(0), 1, Refusal.INSUFFICIENT_FUNDS),
        (balance(-5), 1, Refusal.INSUFFICIENT_FUNDS),
    ],
)
def test_set_aside(before: Balance, amount: int, after: Balance | Refusal) -> None:
    assert ledger.set_aside(before, amount) == after


def test_pending_money_is_posted_or_given_back() -> None:
    assert ledger.post_pending(balance(100, 50), balance(7), 30) == (balance(70, 20), balance(37))
    assert ledger.release(balance(100, 50), 50) == balance(100, 0)
    assert ledger.return_pending(balance(70, 20), balance(37), 30) == (balance(100, 50), balance(7))
    # Who has spent what was paid too much owes it.
    assert ledger.return_pending(balance(70, 20), balance(5), 30) == (
        balance(100, 50),
        balance(-25),
    )
    with pytest.raises(AssertionError):
        ledger.post_pending(balance(100, 50), balance(7), 51)
    with pytest.raises(AssertionError):
        ledger.release(balance(100, 50), 51)


@pytest.mark.parametrize(
    ("payer", "overdraft", "expected"),
    [
        (balance(10), False, (balance(0), balance(10))),
        (balance(9), False, Refusal.INSUFFICIENT_FUNDS),
        (balance(20, 15), False, Refusal.INSUFFICIENT_FUNDS),
        (balance(9), True, (balance(-1), balance(10))),
    ],
)
def test_post(payer: Balance, overdraft: bool, expected: object) -> None:
    assert ledger.post(payer, balance(0), 10, overdraft=overdraft) == expected


def hold(settled: int = 0, expires: int = 1_000, state: str = "open") -> Hold:
    return Hold(
        id=H,
        account=AccountId("acc_a"),
        gateway=GatewayId("gw_1"),
        boot=BootId("B1"),
        amount_micro=1_000,
        settled_micro=settled,
        expires_ms=expires,
        state=state,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("want", "available", "expected"),
    [(100, 500, 100), (100, 60, 60), (100, 0, Refusal.INSUFFICIENT_FUNDS),
     (100, -3, Refusal.INSUFFICIENT_FUNDS)],
)  # fmt: skip
def test_size_of_a_hold(want: int, available: int, expected: int | Refusal) -> None:
    assert holds.size(want, available) == expected


def test_the_life_of_a_hold() -> None:
    assert holds.settle(hold(900), 100) == hold(1_000)
    assert holds.settle(hold(900), 101) == Refusal.HOLD_EXHAUSTED
    assert holds.settle(hold(state="voided"), 1) == Refusal.HOLD_VOIDED
    assert holds.unsettle(hold(900), 100) == hold(800)
    assert holds.unsettle(hold(900), 900) == hold(0)
    assert holds.unsettle(hold(900, state="voided"), 1) == Refusal.HOLD_VOIDED
    with pytest.raises(AssertionError):
        holds.unsettle(hold(900), 901)
    assert holds.renew(hold(), 5_000) == hold(expires=5_000 + parameters.hold_life_ms)
    # A renewal that was delayed does not shorten a life.
    assert holds.renew(hold(expires=10**9), 5_000) == hold(expires=10**9)
    assert holds.renew(hold(state="voided"), 0) == Refusal.HOLD_VOIDED
    assert not holds.lapsed(hold(), 1_000 + parameters.hold_grace_ms - 1)
    assert holds.lapsed(hold(), 1_000 + parameters.hold_grace_ms)
    assert not holds.lapsed(hold(state="voided"), 10**12)


def test_a_purse_from_grant_to_settlement() -> None:
    purse = grants.opened(H, 1_000_000)
    granted = grants.draw(purse, 212)
    assert isinstance(granted, Purse)
    assert granted.free_micro == 999_788
    closed = grants.close(granted, max_micro=212, used_micro=35)
    assert (closed.free_micro, closed.outstanding_micro) == (999_965, 35)
    paid = grants.settled(closed, expected_micro=35, settled_micro=35)
    assert (paid.settled_micro, paid.free_micro) == (35, 999_965)
    less = grants.settled(closed, expected_micro=35, settled_micro=20)
    assert (less.settled_micro, less.free_micro) == (20, 999_980)
    assert grants.draw(paid, 999_966) == Refusal.INSUFFICIENT_FUNDS
    assert paid.idle
    assert not granted.idle
    with pytest.raises(AssertionError):
        grants.close(granted, max_micro=212, used_micro=213)


@pytest.mark.parametrize(
    "changed",
    [
        {"request": RequestId("req_2")},
        {"attempt": 2},
        {"node": NodeId("node_b")},
        {"hold": HoldId("hold_2")},
        {"boot": BootId("B2")},
        {"max_micro": 213},
        {"bill_prompt": False},
        {"price": Price(input_micro_per_mtok=1, output_micro_per_mtok=1, fee_basis_points=1)},
    ],
)
def test_a_seal_covers_every_word_of_a_grant(changed: dict) -> None:
    words = {
        "request": RequestId("req_1"),
        "attempt": 1,
        "node": NodeId("node_a"),
        "hold": H,
        "boot": BootId("B1"),
        "max_micro": 212,
        "bill_prompt": True,
        "price": PRICE,
    }
    seal = grants.seal(b"k" * 32, **words)
    assert len(seal) == grants.SEAL_BYTES
    assert grants.sealed(seal, grants.seal(b"k" * 32, **words))
    assert not grants.sealed(seal, grants.seal(b"k" * 32, **{**words, **changed}))
    assert not grants.sealed(seal, grants.seal(b"x" * 32, **words))


def claim(**changed: object) -> Claim:
    words: dict = {
        "request": RequestId("req_1"),
        "attempt": 1,
        "node": NodeId("node_a"),
        "hold": H,
        "boot": BootId("B1"),
        "max_micro": 212,
        "bill_prompt": True,
        "price": PRICE,
        "prompt_tokens": 40,
        "completion_tokens": 8,
        "claimed": cost(32, 3),
    }
    return Claim(**{**words, **changed})


@pytest.mark.parametrize(
    ("given", "circumstances", "expected"),
    [
        (claim(), {}, cost(32, 3)),
        (claim(), {"sender": NodeId("node_b")}, Refusal.FORGED),
        (claim(), {"seal_ok": False}, Refusal.FORGED),
        (claim(), {"hold": None}, Refusal.UNKNOWN_HOLD),
        (claim(boot=BootId("B2")), {}, Refusal.UNKNOWN_HOLD),
        (claim(), {"hold": hold(state="voided")}, Refusal.HOLD_VOIDED),
        (claim(claimed=cost(33, 3)), {}, Refusal.PRICE_MISMATCH),
        (claim(claimed=cost(31, 3)), {}, Refusal.PRICE_MISMATCH),
        (claim(prompt_tokens=-1), {}, Refusal.MALFORMED),
        (claim(attempt=0), {}, Refusal.MALFORMED),
        # Nothing shown, nothing paid.
        (claim(completion_tokens=0, claimed=cost(0, 0)), {}, cost(0, 0)),
        (claim(completion_tokens=0), {}, Refusal.PRICE_MISMATCH),
        # Only the first of n choices bills the prompt: 8 tokens alone are 16 and 1.
        (claim(bill_prompt=False, claimed=cost(16, 1)), {}, cost(16, 1)),
        # The grant, what earlier attempts took, the hold, and the countersignature each cap it.
        (claim(max_micro=20, claimed=cost(18, 2)), {}, cost(18, 2)),
        (claim(), {"paid_before_micro": 200}, cost(10, 2)),
        (claim(), {"paid_before_micro": 212}, cost(0, 0)),
        (claim(), {"hold": hold(settled=980)}, cost(18, 2)),
        (claim(), {"countersigned_micro": 20}, cost(18, 2)),
        (claim(), {"countersigned_micro": 500}, cost(32, 3)),
    ],
)
def test_judging_a_receipt(given: Claim, circumstances: dict, expected: object) -> None:
    usual: dict = {
        "sender": NodeId("node_a"),
        "hold": hold(),
        "seal_ok": True,
        "paid_before_micro": 0,
        "countersigned_micro": None,
    }
    assert receipts.judge(given, **{**usual, **circumstances}) == expected


@pytest.mark.parametrize(
    ("countersigned", "expected"),
    [(35, cost(0, 0)), (40, cost(0, 0)), (20, cost(14, 1)), (34, cost(1, 0)), (0, cost(32, 3))],
)
def test_a_late_lower_countersignature_takes_back(countersigned: int, expected: Cost) -> None:
    assert receipts.correction(cost(32, 3), countersigned, PRICE) == expected


@pytest.mark.parametrize(
    ("delivered_tokens", "total_micro", "expected"),
    [(8, 35, 35), (8, 20, 20), (8, 500, 35), (4, 500, 26), (0, 500, 0), (4, 20, 20), (9, 35, 35)],
)
def test_a_countersignature_allows_the_lower_of_its_tokens_and_its_total(
    delivered_tokens: int, total_micro: int, expected: int
) -> None:
    allowed = receipts.fair_micro(
        PRICE, 40, bill_prompt=True, delivered_tokens=delivered_tokens, total_micro=total_micro
    )
    assert allowed == expected


@pytest.mark.parametrize(
    ("settled", "paid_before", "countersigned", "expected"),
    [(0, 0, None, False), (965, 0, None, False), (966, 0, None, True), (980, 0, 20, False),
     (981, 0, 20, True), (980, 192, None, False), (981, 192, None, True),
     (1_000, 212, None, False)],
)  # fmt: skip
def test_what_only_the_hold_keeps_from_its_due_is_short(
    settled: int, paid_before: int, countersigned: int | None, expected: bool
) -> None:
    short = receipts.short(
        claim(), hold(settled), paid_before_micro=paid_before, countersigned_micro=countersigned
    )
    assert short == expected
