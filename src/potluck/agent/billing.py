"""What a node writes on a receipt. Rule: the bill counts what was acknowledged, up to the grant."""

import hashlib

from potluck.agent.journal import Unfinished
from potluck.core import pricing, receipts
from potluck.core.ids import Digest, GatewayId, NodeId, receipt_id
from potluck.core.pricing import Price
from potluck.messages.money import Receipt
from potluck.messages.serving import Infer


def blank(infer: Infer, gateway: GatewayId, node: NodeId, tier: str) -> Receipt:
    """All that is known before the first token."""
    return Receipt(
        receipt=receipt_id(infer.request, infer.attempt),
        request=infer.request,
        attempt=infer.attempt,
        hold=infer.grant.hold,
        boot=infer.grant.boot,
        gateway=gateway,
        node=node,
        max_micro=infer.grant.max_micro,
        seal=infer.grant.seal,
        bill_prompt=infer.bill_prompt,
        price=infer.price,
        model=infer.model,
        engine=Digest(""),
        tier=tier,
        prompt_tokens=0,
        completion_tokens=0,
        provider_micro=0,
        fee_micro=0,
        queue_ms=0,
        prefill_ms=0,
        decode_ms=0,
        input_digest=Digest(hashlib.sha256(infer.messages).hexdigest()),
        output_digest=Digest(hashlib.sha256(b"").hexdigest()),
        outcome="",
    )


def bill(receipt: Receipt, acknowledged_tokens: int) -> None:
    """Writes tokens and amounts; the prompt's tokens stand already."""
    price = Price(
        input_micro_per_mtok=receipt.price.input_micro_per_mtok,
        output_micro_per_mtok=receipt.price.output_micro_per_mtok,
        fee_basis_points=receipt.price.fee_basis_points,
    )
    due = receipts.due_for(
        price, receipt.prompt_tokens, acknowledged_tokens, bill_prompt=receipt.bill_prompt
    )
    cost = pricing.capped(due, receipt.max_micro, price)
    receipt.completion_tokens = acknowledged_tokens
    receipt.provider_micro, receipt.fee_micro = cost.provider_micro, cost.fee_micro


def after_restart(known: Unfinished) -> Receipt:
    """The receipt of an attempt that an earlier start of this node did not finish."""
    receipt, ended = known.receipt, known.ended
    receipt.prompt_tokens = known.prompt_tokens
    receipt.outcome = "abandoned"
    if ended is not None:
        receipt.queue_ms, receipt.prefill_ms = ended.queue_ms, ended.prefill_ms
        receipt.decode_ms = ended.decode_ms
        if known.tokens == ended.tokens:
            receipt.outcome = ended.outcome
    receipt.output_digest = Digest(hashlib.sha256(known.data).hexdigest())
    bill(receipt, known.tokens)
    return receipt
