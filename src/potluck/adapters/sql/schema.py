"""Every table, once: DDL, migrations and their check are derived from here.

Statements are written by hand in one module a table, and run on the raw driver; this module is
imported only to create or migrate a database, since SQLAlchemy is slow to load.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
# SQLite's STRICT tables know INTEGER alone, which there is 64 bits wide.
_Whole = BigInteger().with_variant(Integer(), "sqlite")


def _whole(name: str, *, null: bool = False) -> "Column[int]":
    return Column(name, _Whole, nullable=null)


def _text(name: str, *, null: bool = False) -> "Column[str]":
    return Column(name, Text, nullable=null)


def _blob(name: str) -> "Column[bytes]":
    return Column(name, LargeBinary().with_variant(sqlite.BLOB(), "sqlite"), nullable=False)


def _id(name: str = "id") -> "Column[str]":
    return Column(name, Text, primary_key=True, nullable=False)


def _account(*, null: bool = False) -> "Column[str]":
    return Column("account", Text, ForeignKey("accounts.id"), nullable=null)


def _flag(name: str) -> CheckConstraint:
    return CheckConstraint(f"{name} IN (0, 1)", name=name)


_BY_ID: dict[str, Any] = {"sqlite_strict": True, "sqlite_with_rowid": False}
_BY_ROW: dict[str, Any] = {"sqlite_strict": True}

accounts = Table(
    "accounts",
    metadata,
    _id(),
    _text("name"),
    _text("kind"),
    _whole("created_ms"),
    UniqueConstraint("name"),
    CheckConstraint("kind IN ('person', 'provider', 'pool', 'mint')", name="kind"),
    **_BY_ID,
)
keys = Table(
    "keys",
    metadata,
    _id(),
    _account(),
    _text("name"),
    _text("hash"),
    _whole("admin"),
    _whole("created_ms"),
    _whole("expires_ms", null=True),
    _whole("revoked_ms", null=True),
    UniqueConstraint("hash"),
    CheckConstraint("length(hash) = 64", name="hash"),
    _flag("admin"),
    Index(None, "account"),
    **_BY_ID,
)
balances = Table(
    "balances",
    metadata,
    _id("account"),
    _whole("posted_micro"),
    _whole("pending_micro"),
    CheckConstraint("pending_micro >= 0", name="pending"),
    **_BY_ID,
)
# By row: four trees grow with each transfer, and all but one are a third smaller so. None leads
# from a cause: a receipt's transfers are named after it.
transfers = Table(
    "transfers",
    metadata,
    _id(),
    _text("kind"),
    _text("payer"),
    _text("payee"),
    _whole("amount_micro"),
    _text("cause"),
    _text("hold", null=True),
    _whole("at_ms"),
    CheckConstraint("amount_micro > 0", name="amount"),
    CheckConstraint(
        "kind IN ('starting_credit', 'deposit', 'usage', 'fee', 'correction', 'fee_correction')",
        name="kind",
    ),
    Index(None, "payer", "at_ms"),
    Index(None, "payee", "at_ms"),
    **_BY_ROW,
)
holds = Table(
    "holds",
    metadata,
    _id(),
    _account(),
    _text("gateway"),
    _text("boot"),
    _whole("amount_micro"),
    _whole("settled_micro"),
    _whole("expires_ms"),
    _text("state"),
    _whole("want_micro"),
    _blob("grant_key"),
    _whole("opened_ms"),
    CheckConstraint("amount_micro > 0", name="amount"),
    CheckConstraint("settled_micro BETWEEN 0 AND amount_micro", name="settled"),
    CheckConstraint("state IN ('open', 'voided')", name="state"),
    Index(None, "state", "expires_ms"),
    Index(None, "account", "state"),
    **_BY_ID,
)
receipts = Table(
    "receipts",
    metadata,
    _id(),
    _text("request"),
    _whole("attempt"),
    Column("account", Text, nullable=True),
    _text("node"),
    _text("gateway"),
    _text("hold"),
    _blob("body"),
    _blob("root"),
    _blob("signature"),
    _blob("path"),
    _blob("public_key"),
    _whole("provider_micro"),
    _whole("fee_micro"),
    _text("refusal"),
    _whole("at_ms"),
    CheckConstraint("provider_micro >= 0 AND fee_micro >= 0", name="amounts"),
    CheckConstraint("refusal = '' OR provider_micro + fee_micro = 0", name="refused_unpaid"),
    Index(None, "account", "at_ms"),
    Index("ix_receipts_refused", "node", "at_ms", sqlite_where=text("refusal != ''")),
    **_BY_ROW,
)
countersignatures = Table(
    "countersignatures",
    metadata,
    _id("request"),
    Column("attempt", _Whole, primary_key=True, nullable=False, autoincrement=False),
    _id("gateway"),
    _whole("delivered_tokens"),
    _whole("total_micro"),
    _blob("body"),
    _blob("root"),
    _blob("signature"),
    _blob("path"),
    _blob("public_key"),
    _whole("at_ms"),
    CheckConstraint("delivered_tokens >= 0 AND total_micro >= 0", name="amounts"),
    **_BY_ID,
)
nodes = Table(
    "nodes",
    metadata,
    _id(),
    _text("name"),
    _account(),
    _blob("public_key"),
    _text("version"),
    _text("tier"),
    _text("tier_reason"),
    _blob("inventory"),
    _blob("report"),
    _text("liveness"),
    _whole("heard_ms"),
    _whole("closed_ms", null=True),
    _whole("joined_ms"),
    CheckConstraint("liveness IN ('alive', 'suspect', 'dead')", name="liveness"),
    **_BY_ID,
)
gateways = Table(
    "gateways",
    metadata,
    _id(),
    _blob("public_key"),
    _text("boot"),
    _whole("seen_ms"),
    **_BY_ID,
)
deployments = Table(
    "deployments",
    metadata,
    _id("digest"),
    _text("model"),
    _blob("manifest"),
    _whole("slots"),
    _whole("input_micro_per_mtok"),
    _whole("output_micro_per_mtok"),
    _whole("fee_basis_points"),
    _whole("revision"),
    _whole("retired"),
    CheckConstraint("slots > 0", name="slots"),
    CheckConstraint(
        "input_micro_per_mtok >= 0 AND output_micro_per_mtok >= 0 AND fee_basis_points >= 0",
        name="prices",
    ),
    _flag("retired"),
    **_BY_ID,
)
events = Table(
    "events",
    metadata,
    Column("offset", Integer, primary_key=True, nullable=False),
    _whole("at_ms"),
    _text("kind"),
    _text("subject"),
    _text("data"),
    **_BY_ROW,
)
commands = Table(
    "commands",
    metadata,
    _id(),
    _blob("body_hash"),
    _blob("answer"),
    _whole("at_ms"),
    Index(None, "at_ms"),
    **_BY_ID,
)
outbox = Table(
    "outbox",
    metadata,
    Column("id", Integer, primary_key=True, nullable=False),
    _text("subject"),
    _blob("body"),
    **_BY_ROW,
)


def statements() -> Iterator[str]:
    """The DDL of an empty database, in order."""
    dialect = sqlite.dialect()
    for table in metadata.sorted_tables:
        yield str(CreateTable(table).compile(dialect=dialect))
        for index in sorted(table.indexes, key=lambda one: str(one.name)):
            yield str(CreateIndex(index).compile(dialect=dialect))
