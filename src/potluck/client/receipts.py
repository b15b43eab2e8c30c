"""Checks a receipt offline: nothing but the document itself and mathematics is trusted.

Proved are: who signed, what was signed, and that the shown amounts are the signed ones. Not proved
is what only the pool knows: that it was settled.
"""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from potluck.core import ids, merkle, pricing
from potluck.core import receipts as rules
from potluck.core.pricing import Price
from potluck.messages import money, views
from potluck.messages.views import ReceiptView, SignedView
from potluck.ports.keys import Verifier


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, and what was found."""

    name: str
    ok: bool
    detail: str


_UNKEYED = "no accidental change; it is no signature"
_PROVED = "ids, digests, tokens, prices as signed; names, account, time are the pool's word"


def verify(view: ReceiptView, verifier: Verifier) -> list[Check]:
    """All checks, in a fixed order; the receipt stands if all are `ok`."""
    try:
        receipt = money.receipt_decoder.decode(_bytes(view.signed.body))
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        return [Check("document", False, f"the signed bytes are no receipt: {error}")]
    checks = [
        Check("document", True, receipt.receipt),
        _unchanged(view),
        _signed(view.signed, "node's signature", money.RECEIPTS_DOMAIN, verifier),
        _named("node's key", receipt.node, ids.node_id, view.signed),
        *_shown(view, receipt),
        _priced(receipt),
        _within(view, receipt),
    ]
    if view.countersigned is not None:
        checks += _countersigned(view, receipt, view.countersigned, verifier)
    else:
        checks.append(Check("gateway's signature", True, "none: only the node's word is proved"))
    return checks


def _unchanged(view: ReceiptView) -> Check:
    ok = view.checksum == views.checksum(view)
    return Check("checksum", ok, _UNKEYED if ok else "a byte of it was changed")


def _signed(signed: SignedView, name: str, domain: bytes, verifier: Verifier) -> Check:
    try:
        body, root = _bytes(signed.body), _bytes(signed.root)
        path = [_bytes(step) for step in signed.path]
        public_key, signature = _bytes(signed.public_key), _bytes(signed.signature)
    except (binascii.Error, ValueError) as error:
        return Check(name, False, f"not base64: {error}")
    if not merkle.included(body, signed.index, signed.size, path, root):
        return Check(name, False, "the receipt is not under the signed Merkle root")
    if not verifier.verify(public_key, signature, domain + root):
        return Check(name, False, "the Ed25519 signature is not over this root")
    return Check(name, True, f"Ed25519 over Merkle leaf {signed.index + 1} of {signed.size}")


def _named(name: str, claimed: str, derive: object, signed: SignedView) -> Check:
    assert callable(derive)
    try:
        derived = derive(_bytes(signed.public_key))
    except (binascii.Error, ValueError) as error:
        return Check(name, False, f"not base64: {error}")
    return Check(name, derived == claimed, claimed if derived == claimed else f"it is {derived}'s")


def _shown(view: ReceiptView, receipt: money.Receipt) -> Iterator[Check]:
    """What is shown beside the signed bytes must be what they say."""
    pairs: list[tuple[str, object, object]] = [
        ("id", view.id, receipt.receipt),
        ("request", view.request, receipt.request),
        ("attempt", view.attempt, receipt.attempt),
        ("node", view.node, receipt.node),
        ("gateway", view.gateway, receipt.gateway),
        ("hold", view.hold, receipt.hold),
        ("model", view.model_digest, receipt.model),
        ("engine", view.engine_digest, receipt.engine),
        ("tier", view.tier, receipt.tier),
        ("outcome", view.outcome, receipt.outcome),
        ("prompt tokens", view.prompt_tokens, receipt.prompt_tokens),
        ("completion tokens", view.completion_tokens, receipt.completion_tokens),
        ("input price", view.input_micro_per_mtok, receipt.price.input_micro_per_mtok),
        ("output price", view.output_micro_per_mtok, receipt.price.output_micro_per_mtok),
        ("fee", view.fee_basis_points, receipt.price.fee_basis_points),
        ("grant", view.max_micro, receipt.max_micro),
        ("claim", view.claimed_micro, receipt.provider_micro + receipt.fee_micro),
        (
            "durations",
            (view.queue_ms, view.prefill_ms, view.decode_ms),
            (receipt.queue_ms, receipt.prefill_ms, receipt.decode_ms),
        ),
        ("input digest", view.input_digest, receipt.input_digest),
        ("output digest", view.output_digest, receipt.output_digest),
    ]
    wrong = [f"{name}: {shown!r}, signed {said!r}" for name, shown, said in pairs if shown != said]
    yield Check("what is shown", not wrong, "; ".join(wrong) or _PROVED)


def _priced(receipt: money.Receipt) -> Check:
    """The amounts follow from tokens and prices."""
    price = Price(
        input_micro_per_mtok=receipt.price.input_micro_per_mtok,
        output_micro_per_mtok=receipt.price.output_micro_per_mtok,
        fee_basis_points=receipt.price.fee_basis_points,
    )
    due = rules.due_for(
        price,
        receipt.prompt_tokens,
        receipt.completion_tokens,
        bill_prompt=receipt.bill_prompt,
    )
    fair = pricing.capped(due, receipt.max_micro, price)
    ok = (fair.provider_micro, fair.fee_micro) == (receipt.provider_micro, receipt.fee_micro)
    detail = (
        f"{receipt.prompt_tokens} + {receipt.completion_tokens} tokens cost "
        f"{fair.provider_micro} + {fair.fee_micro} micro-credits"
    )
    return Check("amounts", ok, detail)


def _within(view: ReceiptView, receipt: money.Receipt) -> Check:
    """What was taken is no more than what was signed for, and than what was granted."""
    claimed = receipt.provider_micro + receipt.fee_micro
    ok = view.total_micro == view.provider_micro + view.fee_micro and 0 <= view.total_micro <= min(
        claimed, receipt.max_micro
    )
    return Check("settled", ok, f"{view.total_micro} of {claimed} claimed, by the pool's word")


def _countersigned(
    view: ReceiptView, receipt: money.Receipt, signed: SignedView, verifier: Verifier
) -> Iterator[Check]:
    yield _signed(signed, "gateway's signature", money.COUNTERSIGN_DOMAIN, verifier)
    yield _named("gateway's key", receipt.gateway, ids.gateway_id, signed)
    try:
        delivery = money.delivery_decoder.decode(_bytes(signed.body))
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        yield Check("delivery", False, f"the countersigned bytes are no delivery: {error}")
        return
    same = (delivery.request, delivery.attempt) == (receipt.request, receipt.attempt)
    ok = same and view.total_micro <= delivery.total_micro
    ok = ok and view.delivered_tokens == delivery.delivered_tokens
    yield Check("delivery", ok, f"the gateway delivered {delivery.delivered_tokens} tokens")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
