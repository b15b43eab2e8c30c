"""What a request may cost at most, and what it cost.

One rounding for each receipt: half-even for the provider's part, down for the fee, so that the
remainder is the provider's.
"""

from dataclasses import dataclass

from potluck.core import parameters


@dataclass(frozen=True, kw_only=True)
class Price:
    """Micro-credits per million tokens; the fee in basis points comes on top."""

    input_micro_per_mtok: int
    output_micro_per_mtok: int
    fee_basis_points: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    provider_micro: int
    fee_micro: int

    @property
    def total_micro(self) -> int:
        return self.provider_micro + self.fee_micro


FREE = Cost(provider_micro=0, fee_micro=0)


def cost(price: Price, *, prompt_tokens: int, completion_tokens: int) -> Cost:
    """40 and 8 tokens at 400,000 and 2,000,000 cost 32 + 3 micro-credits."""
    parts = (
        prompt_tokens * price.input_micro_per_mtok + completion_tokens * price.output_micro_per_mtok
    )
    provider_micro = divide_half_even(parts, parameters.TOKENS_PER_PRICE)
    fee_micro = provider_micro * price.fee_basis_points // 10_000
    return Cost(provider_micro=provider_micro, fee_micro=fee_micro)


def cost_max_micro(price: Price, *, prompt_bytes: int, completion_tokens_max: int) -> int:
    """An upper bound before tokenizing: a token covers at least one byte of the prompt.

    ceil(((96 + 64) * 0.4 + 64 * 2.0) * 1.1) = 212 for 96 bytes and 64 tokens.
    """
    prompt_tokens_max = prompt_bytes + parameters.template_tokens_margin
    parts = (
        prompt_tokens_max * price.input_micro_per_mtok
        + completion_tokens_max * price.output_micro_per_mtok
    )
    scaled = parts * (10_000 + price.fee_basis_points)
    # Rounding up covers the half-even rounding of `cost` too, while the fee is below 100 %.
    return -(-scaled // (parameters.TOKENS_PER_PRICE * 10_000))


def capped(total: Cost, max_micro: int, price: Price) -> Cost:
    """The cost, lowered to `max_micro`; provider and fee keep their proportion, neither grows."""
    if total.total_micro <= max_micro:
        return total
    share_micro = max_micro * 10_000 // (10_000 + price.fee_basis_points)
    fee_micro = min(total.fee_micro, max_micro - share_micro)
    return Cost(provider_micro=max_micro - fee_micro, fee_micro=fee_micro)


def divide_half_even(numerator: int, denominator: int) -> int:
    quotient, remainder = divmod(numerator, denominator)
    if 2 * remainder > denominator or (2 * remainder == denominator and quotient % 2 == 1):
        return quotient + 1
    return quotient
