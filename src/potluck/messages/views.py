"""What `/api/v1` shows, in JSON: written by the coordinator, read by CLI, SDK and people.

Money is whole micro-credits, time is milliseconds since 1970 by the coordinator's clock.
"""

import hashlib
from typing import Generic, Literal, TypeVar

import msgspec

ItemT = TypeVar("ItemT")


class View(msgspec.Struct):
    """Base of all views: JSON objects with these names."""


class Page(View, Generic[ItemT]):
    """`offset` is the event feed's when this was read: ask for at least it to read your writes."""

    data: list[ItemT]
    offset: int
    object: Literal["list"] = "list"


class AcceleratorView(View):
    kind: str
    name: str
    memory_bytes: int


class ReplicaView(View):
    model: str
    digest: str
    state: str
    slots: int
    in_flight: int
    context_tokens: int
    detail: str
    fetched_bytes: int
    size_bytes: int


class NodeView(View):
    id: str
    name: str
    liveness: str
    account: str
    tier: str
    tier_reason: str
    version: str
    hostname: str
    os: str
    arch: str
    cpu_model: str
    cpu_cores: int
    cpu_percent: float
    memory_bytes: int
    memory_free_bytes: int
    disk_free_bytes: int
    accelerators: list[AcceleratorView]
    replicas: list[ReplicaView]
    receipts_waiting: int
    heard_ms: int
    joined_ms: int


class ModelView(View):
    id: str
    digest: str
    size_bytes: int
    format: str
    licence: str
    context_tokens: int
    memory_bytes: int
    redundancy_class: str
    input_micro_per_mtok: int
    output_micro_per_mtok: int
    fee_basis_points: int
    replicas_ready: int
    replicas_wanted: int


class AccountView(View):
    id: str
    name: str
    kind: str
    posted_micro: int
    pending_micro: int
    available_micro: int
    created_ms: int


class KeyView(View):
    """Never the key itself: only its hash is kept."""

    id: str
    account: str
    name: str
    admin: bool
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None


class CreatedKeyView(View):
    """`key` is shown this once."""

    id: str
    account: str
    name: str
    admin: bool
    expires_ms: int | None
    key: str


class TransferView(View):
    id: str
    kind: str
    payer: str
    payee: str
    amount_micro: int
    cause: str
    hold: str | None
    at_ms: int


class HoldView(View):
    id: str
    account: str
    gateway: str
    amount_micro: int
    settled_micro: int
    expires_ms: int
    released_at_latest_ms: int
    """Life and grace: then the rest is free again, whatever happens."""
    state: str


class SignedView(View):
    """Enough to check offline: base64 of the exact bytes, of the signature and the Merkle path."""

    body: str
    domain: str
    root: str
    signature: str
    public_key: str
    index: int
    size: int
    path: list[str]


class ReceiptView(View):
    id: str
    request: str
    attempt: int
    account: str | None
    node: str
    node_name: str
    gateway: str
    hold: str
    model: str
    model_digest: str
    engine_digest: str
    tier: str
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    input_micro_per_mtok: int
    output_micro_per_mtok: int
    fee_basis_points: int
    max_micro: int
    claimed_micro: int
    """What the node's receipt says in all."""
    provider_micro: int
    fee_micro: int
    total_micro: int
    """What was settled."""
    refusal: str
    queue_ms: int
    prefill_ms: int
    decode_ms: int
    input_digest: str
    output_digest: str
    settled_ms: int
    signed: SignedView
    countersigned: SignedView | None
    delivered_tokens: int | None
    checksum: str = ""
    """Finds a changed byte anywhere; signatures find a forged amount."""


def checksum(view: ReceiptView) -> str:
    """Hex SHA-256 over the view's JSON with an empty checksum."""
    return hashlib.sha256(
        msgspec.json.encode(msgspec.structs.replace(view, checksum=""))
    ).hexdigest()


class ReceiptLineView(View):
    """A receipt in a list."""

    id: str
    request: str
    attempt: int
    account: str | None
    node: str
    model: str
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    total_micro: int
    refusal: str
    settled_ms: int


class EventView(View):
    offset: int
    at_ms: int
    kind: str
    subject: str
    data: msgspec.Raw


class StatusView(View):
    pool: str
    version: str
    coordinator: str
    nodes_alive: int
    nodes_suspect: int
    nodes_dead: int
    evictions_frozen: bool
    replicas_ready: int
    accounts: int
    holds_open: int
    receipts: int
    offset: int
    books_balance: bool
