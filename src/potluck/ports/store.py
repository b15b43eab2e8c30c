"""Truth: one SQL database, changed only inside `transact`.

Use-cases are functions of a transaction. What they write and the messages that it causes are one
commit; the messages leave afterwards (`outbox`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar

from potluck.core.holds import Hold
from potluck.core.ids import (
    AccountId,
    BootId,
    Digest,
    GatewayId,
    HoldId,
    KeyId,
    NodeId,
    ReceiptId,
    RequestId,
    TransferId,
)
from potluck.core.ledger import Balance
from potluck.core.nodes import Liveness

ResultT = TypeVar("ResultT")
ROWS_ALL: Final = 2**62
"""No limit."""
TransferKind = Literal["starting_credit", "deposit", "usage", "fee", "correction", "fee_correction"]


class StoreUnavailableError(Exception):
    """The database cannot be reached or is closed; the caller may try again."""


class StoreFullError(Exception):
    """No room on the disk: nothing of the transaction was kept."""


class SchemaTooNewError(Exception):
    """The database was written by a newer Potluck; this one will not touch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    id: AccountId
    name: str
    kind: Literal["person", "provider", "pool", "mint"]
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    id: KeyId
    account: AccountId
    name: str
    hash: str
    """Hex SHA-256 of the key; the key itself is never stored."""
    admin: bool
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRow:
    id: TransferId
    kind: TransferKind
    payer: AccountId
    payee: AccountId
    amount_micro: int
    cause: str
    """The id of what it was for: a receipt, an account."""
    hold: HoldId | None
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRow:
    hold: Hold
    want_micro: int
    """With `account`: the body of the request, to answer a repeat alike."""
    grant_key: bytes
    opened_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptRow:
    id: ReceiptId
    request: RequestId
    attempt: int
    account: AccountId | None
    node: NodeId
    gateway: GatewayId
    hold: HoldId
    body: bytes
    """The exact signed bytes (messages.money.Receipt)."""
    root: bytes
    signature: bytes
    path: bytes
    """MessagePack: [index, size, [sibling, …]] (core/merkle)."""
    public_key: bytes
    provider_micro: int
    fee_micro: int
    """What was settled, which may be less than the receipt claims."""
    refusal: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersignatureRow:
    request: RequestId
    attempt: int
    gateway: GatewayId
    delivered_tokens: int
    total_micro: int
    body: bytes
    root: bytes
    signature: bytes
    path: bytes
    public_key: bytes
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    id: NodeId
    name: str
    account: AccountId
    public_key: bytes
    version: str
    tier: str
    tier_reason: str
    inventory: bytes
    """MessagePack of messages.membership.Inventory."""
    report: bytes
    """MessagePack of the last Heartbeat, or empty."""
    liveness: Liveness
    heard_ms: int
    """Wall clock of the coordinator's machine."""
    closed_ms: int | None
    joined_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRow:
    id: GatewayId
    public_key: bytes
    boot: BootId
    seen_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRow:
    digest: Digest
    model: str
    manifest: bytes
    """MessagePack of messages.membership.Manifest."""
    slots: int
    input_micro_per_mtok: int
    output_micro_per_mtok: int
    fee_basis_points: int
    revision: int
    retired: bool = False
    """Served no more; kept, because receipts name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    offset: int
    at_ms: int
    kind: str
    subject: str
    data: str
    """JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    id: int
    subject: str
    body: bytes


class Accounts(Protocol):
    def get(self, account: AccountId) -> AccountRow | None: ...
    def by_name(self, name: str) -> AccountRow | None: ...
    def insert(self, row: AccountRow) -> None: ...
    def list(self, limit: int = ROWS_ALL) -> Sequence[AccountRow]: ...
    def count(self, limit: int) -> int: ...


class Keys(Protocol):
    def by_hash(self, key_hash: str) -> KeyRow | None: ...
    def get(self, key: KeyId) -> KeyRow | None: ...
    def insert(self, row: KeyRow) -> None: ...
    def revoke(self, key: KeyId, at_ms: int) -> None: ...
    def list(self, account: AccountId | None = None, limit: int = ROWS_ALL) -> Sequence[KeyRow]:
        """Newest first."""

    def live_of(self, account: AccountId, now_ms: int) -> int:
        """How many of its keys are valid."""

    def lasting_admins(self) -> int:
        """Valid keys with the right to administer that never expire."""

    def forget_dead_of(self, account: AccountId, now_ms: int, keep: int) -> None:
        """Removes the oldest revoked or expired keys of the account, but for the last `keep`."""


class Balances(Protocol):
    """Derived from transfers and holds, kept beside them in the same transaction."""

    def get(self, account: AccountId) -> Balance: ...
    def put(self, account: AccountId, balance: Balance) -> None: ...
    def list(self) -> Sequence[tuple[AccountId, Balance]]: ...


class Transfers(Protocol):
    """Append-only."""

    def get(self, transfer: TransferId) -> TransferRow | None: ...
    def insert(self, row: TransferRow) -> None: ...
    def list(
        self, account: AccountId | None = None, limit: int = 100, before_ms: int | None = None
    ) -> Sequence[TransferRow]:
        """Newest first."""

    def sums(self) -> Sequence[tuple[AccountId, int]]:
        """Posted balance of each account by replaying every transfer."""


class Holds(Protocol):
    def get(self, hold: HoldId) -> HoldRow | None: ...
    def insert(self, row: HoldRow) -> None: ...
    def update(self, hold: Hold) -> None:
        """Writes settled amount, expiry and state; the rest never changes."""

    def open_of(self, account: AccountId) -> Sequence[HoldRow]: ...
    def list_open(self, limit: int) -> Sequence[HoldRow]: ...
    def postpone(self, by_ms: int) -> None:
        """Every open hold ends so much later."""

    def settled(self) -> Sequence[Hold]:
        """Every hold that ever was, open or voided."""

    def open_until(self, expires_ms_max: int, limit: int) -> Sequence[HoldRow]:
        """Open holds whose life ended at or before this moment, oldest first."""

    def pending_sums(self) -> Sequence[tuple[AccountId, int]]:
        """For each account what its open holds set aside and have not settled."""

    def count_open(self, limit: int = ROWS_ALL) -> int: ...


class Receipts(Protocol):
    """Append-only, but for what is settled on a correction."""

    def get(self, receipt: ReceiptId) -> ReceiptRow | None: ...
    def insert(self, row: ReceiptRow) -> None: ...
    def of_request(self, request: RequestId) -> Sequence[ReceiptRow]:
        """Of all its attempts, in their order."""

    def settled_sums(self) -> Sequence[tuple[HoldId, int]]:
        """For each hold what is settled by its receipts, corrections included."""

    def refused_of(self, node: NodeId) -> int:
        """How many refused receipts of this node are kept."""

    def correct(self, receipt: ReceiptId, provider_micro: int, fee_micro: int) -> None: ...
    def count(self) -> int: ...
    def list(self, account: AccountId | None = None, limit: int = 100) -> Sequence[ReceiptRow]:
        """Newest first."""


class Countersignatures(Protocol):
    def get(
        self, request: RequestId, attempt: int, gateway: GatewayId
    ) -> CountersignatureRow | None: ...
    def insert(self, row: CountersignatureRow) -> bool:
        """False: this gateway's first word for the attempt is known, and stands."""


class Nodes(Protocol):
    def get(self, node: NodeId) -> NodeRow | None: ...
    def put(self, row: NodeRow) -> None: ...
    def list(self) -> Sequence[NodeRow]: ...


class Gateways(Protocol):
    def get(self, gateway: GatewayId) -> GatewayRow | None: ...
    def put(self, row: GatewayRow) -> None: ...
    def list(self) -> Sequence[GatewayRow]: ...


class Deployments(Protocol):
    def get(self, digest: Digest) -> DeploymentRow | None: ...
    def put(self, row: DeploymentRow) -> None: ...
    def list(self) -> Sequence[DeploymentRow]: ...


class Events(Protocol):
    """Append-only; offsets grow without a gap."""

    def append(self, at_ms: int, kind: str, subject: str, data: str) -> int: ...
    def after(self, offset: int, limit: int) -> Sequence[EventRow]: ...
    def last_offset(self) -> int: ...


class Commands(Protocol):
    """What was answered to which command, so that a repeat is answered alike."""

    def get(self, command: str) -> tuple[bytes, bytes] | None:
        """(SHA-256 of the body, the answer's bytes)."""

    def insert(self, command: str, body_hash: bytes, answer: bytes, at_ms: int) -> None: ...
    def prune(self, before_ms: int, limit: int) -> None: ...


class Outbox(Protocol):
    def add(self, subject: str, body: bytes) -> None:
        """A message body (no envelope) that leaves after the commit."""

    def pending(self, limit: int) -> Sequence[OutboxRow]: ...
    def remove(self, ids: Sequence[int]) -> None: ...


class Tx(Protocol):
    """One transaction; one attribute a table. Not to be kept after the function returns."""

    @property
    def accounts(self) -> Accounts: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def balances(self) -> Balances: ...
    @property
    def transfers(self) -> Transfers: ...
    @property
    def holds(self) -> Holds: ...
    @property
    def receipts(self) -> Receipts: ...
    @property
    def countersignatures(self) -> Countersignatures: ...
    @property
    def nodes(self) -> Nodes: ...
    @property
    def gateways(self) -> Gateways: ...
    @property
    def deployments(self) -> Deployments: ...
    @property
    def events(self) -> Events: ...
    @property
    def commands(self) -> Commands: ...
    @property
    def outbox(self) -> Outbox: ...


class Store(Protocol):
    async def transact(self, work: Callable[[Tx], ResultT]) -> ResultT:
        """Runs `work` as one item of a group; returns after the group is on the disk.

        If `work` raises, what it wrote alone is rolled back and the error comes back here. It may
        run again if another of its group failed: it must touch nothing but `tx`.
        Raises `StoreUnavailableError` or `StoreFullError`; then nothing was kept.
        """

    async def close(self) -> None: ...
