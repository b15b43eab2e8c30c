"""One request's words between gateway and node. Both sides send batches, one a loop turn.

Golden bytes: tests/golden/. The conversation: docs/protocol/serving.md.
"""

from typing import Literal

import msgspec

from potluck.core.ids import BootId, Digest, HoldId, RequestId
from potluck.core.pricing import Price
from potluck.messages.envelope import Body

FinishReason = Literal["stop", "length", "cancelled"]


class WirePrice(Body):
    """Micro-credits per million tokens; fee in basis points."""

    input_micro_per_mtok: int
    output_micro_per_mtok: int
    fee_basis_points: int


def wire_price(price: Price) -> WirePrice:
    return WirePrice(
        input_micro_per_mtok=price.input_micro_per_mtok,
        output_micro_per_mtok=price.output_micro_per_mtok,
        fee_basis_points=price.fee_basis_points,
    )


def price_of(wire: WirePrice) -> Price:
    return Price(
        input_micro_per_mtok=wire.input_micro_per_mtok,
        output_micro_per_mtok=wire.output_micro_per_mtok,
        fee_basis_points=wire.fee_basis_points,
    )


class Grant(Body):
    """The right to draw on a standing hold, sealed for this request, attempt and node."""

    hold: HoldId
    boot: BootId
    max_micro: int
    seal: bytes


class Sampling(Body):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    """None: no logprobs. 0: the chosen token's only."""


class Infer(Body, tag="infer"):
    """Start this attempt. Said again with the same request and attempt, it changes nothing."""

    request: RequestId
    attempt: int
    grant: Grant
    price: WirePrice
    model: Digest
    messages: bytes
    """JSON array of `{"role", "content"}`, content always a string."""
    sampling: Sampling
    stream: bool
    """False: chunks may be gathered for as long as a keep-alive."""
    bill_prompt: bool
    first_token_ms: int
    total_ms: int


class Ack(Body, tag="ack"):
    """All chunks up to `seq` were handed on. After `Done` it closes the attempt."""

    request: RequestId
    attempt: int
    seq: int


class Resend(Body, tag="resend"):
    request: RequestId
    attempt: int
    from_seq: int


class Cancel(Body, tag="cancel"):
    """Stop the engine. `acked_seq` is the last chunk handed on (-1: none), and what is paid."""

    request: RequestId
    attempt: int
    acked_seq: int


class Accepted(Body, tag="accepted"):
    request: RequestId
    attempt: int
    queue_depth: int


class Chunk(Body, tag="chunk"):
    """`data` is the answer's next bytes; a character may be split between two chunks.

    `logprobs` is JSON: the entries of OpenAI's `choices[].logprobs.content`, comma-separated,
    without the brackets.
    """

    request: RequestId
    attempt: int
    seq: int
    token_ids: tuple[int, ...]
    data: bytes
    logprobs: bytes = b""


class KeepAlive(Body, tag="keepalive"):
    """Queued, in prefill, or paused by a full window: silent, but not gone."""

    request: RequestId
    attempt: int


class Done(Body, tag="done"):
    """The attempt's end, after chunk `last_seq` (-1: there was none)."""

    request: RequestId
    attempt: int
    last_seq: int
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    queue_ms: int
    prefill_ms: int
    decode_ms: int


class Failed(Body, tag="failed"):
    """The attempt ends without an answer; `code` is a `Refusal`."""

    request: RequestId
    attempt: int
    code: str
    message: str


ToNode = Infer | Ack | Resend | Cancel
ToGateway = Accepted | Chunk | KeepAlive | Done | Failed


class Serve(Body):
    """Gateway to node, subject verb `serve`."""

    items: list[ToNode]


class Frames(Body):
    """Node to gateway, subject verb `frames`."""

    items: list[ToGateway]


serve_decoder = msgspec.msgpack.Decoder(Serve)
frames_decoder = msgspec.msgpack.Decoder(Frames)
