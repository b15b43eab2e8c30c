"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column(
            "created_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.CheckConstraint(
            "kind IN ('person', 'provider', 'pool', 'mint')", name=op.f("ck_accounts_kind")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("name", name=op.f("uq_accounts_name")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "balances",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column(
            "posted_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column(
            "pending_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.CheckConstraint("pending_micro >= 0", name=op.f("ck_balances_pending")),
        sa.PrimaryKeyConstraint("account", name=op.f("pk_balances")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "commands",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("body_hash", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("answer", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("at_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commands")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_commands_at_ms"), "commands", ["at_ms"], unique=False)
    op.create_table(
        "countersignatures",
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column(
            "attempt",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("gateway", sa.Text(), nullable=False),
        sa.Column(
            "delivered_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column(
            "total_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("body", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("root", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("signature", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("path", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("public_key", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("at_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.CheckConstraint(
            "delivered_tokens >= 0 AND total_micro >= 0", name=op.f("ck_countersignatures_amounts")
        ),
        sa.PrimaryKeyConstraint("request", "attempt", "gateway", name=op.f("pk_countersignatures")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "deployments",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("manifest", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("slots", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "input_micro_per_mtok",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            nullable=False,
        ),
        sa.Column(
            "output_micro_per_mtok",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            nullable=False,
        ),
        sa.Column(
            "fee_basis_points", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("revision", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("retired", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.CheckConstraint(
            "input_micro_per_mtok >= 0 AND output_micro_per_mtok >= 0 AND fee_basis_points >= 0",
            name=op.f("ck_deployments_prices"),
        ),
        sa.CheckConstraint("slots > 0", name=op.f("ck_deployments_slots")),
        sa.CheckConstraint("retired IN (0, 1)", name=op.f("ck_deployments_retired")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_deployments")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "events",
        sa.Column("offset", sa.Integer(), nullable=False),
        sa.Column("at_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("offset", name=op.f("pk_events")),
        sqlite_strict=True,
    )
    op.create_table(
        "gateways",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("public_key", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("boot", sa.Text(), nullable=False),
        sa.Column("seen_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateways")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sqlite_strict=True,
    )
    op.create_table(
        "receipts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("account", sa.Text(), nullable=True),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("gateway", sa.Text(), nullable=False),
        sa.Column("hold", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("root", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("signature", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("path", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("public_key", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column(
            "provider_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column(
            "fee_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("refusal", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.CheckConstraint(
            "refusal = '' OR provider_micro + fee_micro = 0",
            name=op.f("ck_receipts_refused_unpaid"),
        ),
        sa.CheckConstraint(
            "provider_micro >= 0 AND fee_micro >= 0", name=op.f("ck_receipts_amounts")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_receipts")),
        sqlite_strict=True,
    )
    op.create_index(
        op.f("ix_receipts_account_at_ms"), "receipts", ["account", "at_ms"], unique=False
    )
    op.create_index(
        "ix_receipts_refused",
        "receipts",
        ["node", "at_ms"],
        unique=False,
        sqlite_where=sa.text("refusal != ''"),
    )
    op.create_table(
        "transfers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("payer", sa.Text(), nullable=False),
        sa.Column("payee", sa.Text(), nullable=False),
        sa.Column(
            "amount_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("hold", sa.Text(), nullable=True),
        sa.Column("at_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.CheckConstraint(
            "kind IN ('starting_credit', 'deposit', 'usage', 'fee', 'correction', "
            "'fee_correction')",
            name=op.f("ck_transfers_kind"),
        ),
        sa.CheckConstraint("amount_micro > 0", name=op.f("ck_transfers_amount")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transfers")),
        sqlite_strict=True,
    )
    op.create_index(op.f("ix_transfers_payee_at_ms"), "transfers", ["payee", "at_ms"], unique=False)
    op.create_index(op.f("ix_transfers_payer_at_ms"), "transfers", ["payer", "at_ms"], unique=False)
    op.create_table(
        "holds",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("gateway", sa.Text(), nullable=False),
        sa.Column("boot", sa.Text(), nullable=False),
        sa.Column(
            "amount_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column(
            "settled_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column(
            "expires_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column(
            "want_micro", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("grant_key", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column(
            "opened_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.CheckConstraint("state IN ('open', 'voided')", name=op.f("ck_holds_state")),
        sa.CheckConstraint("amount_micro > 0", name=op.f("ck_holds_amount")),
        sa.CheckConstraint(
            "settled_micro BETWEEN 0 AND amount_micro", name=op.f("ck_holds_settled")
        ),
        sa.ForeignKeyConstraint(["account"], ["accounts.id"], name=op.f("fk_holds_account")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_holds")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_holds_account_state"), "holds", ["account", "state"], unique=False)
    op.create_index(
        op.f("ix_holds_state_expires_ms"), "holds", ["state", "expires_ms"], unique=False
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("admin", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "created_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column(
            "expires_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True
        ),
        sa.Column(
            "revoked_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True
        ),
        sa.CheckConstraint("admin IN (0, 1)", name=op.f("ck_keys_admin")),
        sa.CheckConstraint("length(hash) = 64", name=op.f("ck_keys_hash")),
        sa.ForeignKeyConstraint(["account"], ["accounts.id"], name=op.f("fk_keys_account")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_keys_hash")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_keys_account"), "keys", ["account"], unique=False)
    op.create_table(
        "nodes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("public_key", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("tier_reason", sa.Text(), nullable=False),
        sa.Column("inventory", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("report", sa.LargeBinary().with_variant(sa.BLOB(), "sqlite"), nullable=False),
        sa.Column("liveness", sa.Text(), nullable=False),
        sa.Column("heard_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("closed_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column(
            "joined_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.CheckConstraint(
            "liveness IN ('alive', 'suspect', 'dead')", name=op.f("ck_nodes_liveness")
        ),
        sa.ForeignKeyConstraint(["account"], ["accounts.id"], name=op.f("fk_nodes_account")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
