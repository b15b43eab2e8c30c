"""What a pool starts with. Idempotent: every start of the coordinator says it again."""

import dataclasses
from dataclasses import dataclass

from potluck.coordinator import events, money
from potluck.core import parameters
from potluck.core.ids import MINT, POOL, AccountId, KeyId, TransferId
from potluck.core.pricing import Price
from potluck.messages import envelope
from potluck.messages.membership import Manifest
from potluck.ports.ids import Ids
from potluck.ports.store import AccountRow, DeploymentRow, KeyRow, Tx


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """The composition root's wish; ids are chosen once and kept by it."""

    owner: AccountId
    provider: AccountId
    key: KeyId
    key_hash: str
    """Hex SHA-256 of the owner's API key, which has the right to administer."""
    manifest: Manifest
    slots: int
    price: Price
    owner_name: str = "owner"
    provider_name: str = "provider"
    starting_credit_micro: int = parameters.starting_credit_micro


def ensure(tx: Tx, founding: Founding, now_ms: int, ids: Ids) -> None:
    _accounts(tx, founding, now_ms, ids)
    if tx.keys.get(founding.key) is None and tx.keys.by_hash(founding.key_hash) is None:
        tx.keys.insert(
            KeyRow(
                id=founding.key,
                account=founding.owner,
                name="owner",
                hash=founding.key_hash,
                admin=True,
                created_ms=now_ms,
                expires_ms=None,
                revoked_ms=None,
            )
        )
        events.record(tx, now_ms, "key_created", founding.key, account=founding.owner)
    _deployment(tx, founding, now_ms)


def create_account(tx: Tx, row: AccountRow, credit_micro: int, transfer: TransferId) -> None:
    """The account, and its starting credit from the mint, in one transaction."""
    tx.accounts.insert(row)
    events.record(tx, row.created_ms, "account_created", row.id, name=row.name, kind=row.kind)
    if credit_micro:
        money.post(
            tx,
            id=transfer,
            kind="starting_credit",
            payer=MINT,
            payee=row.id,
            amount_micro=credit_micro,
            cause=row.id,
            hold=None,
            at_ms=row.created_ms,
            overdraft=True,
        )


def _accounts(tx: Tx, founding: Founding, now_ms: int, ids: Ids) -> None:
    wanted = (
        (AccountRow(id=MINT, name="mint", kind="mint", created_ms=now_ms), 0),
        (AccountRow(id=POOL, name="pool", kind="pool", created_ms=now_ms), 0),
        (
            AccountRow(
                id=founding.owner, name=founding.owner_name, kind="person", created_ms=now_ms
            ),
            founding.starting_credit_micro,
        ),
        (
            AccountRow(
                id=founding.provider,
                name=founding.provider_name,
                kind="provider",
                created_ms=now_ms,
            ),
            0,
        ),
    )
    for row, credit_micro in wanted:
        if tx.accounts.get(row.id) is None:
            create_account(tx, row, credit_micro, TransferId("tr_" + ids.ulid()))


def _deployment(tx: Tx, founding: Founding, now_ms: int) -> None:
    """The model of the pool. Another one replaces it under a higher revision, so that nodes unload
    what was served before; its row stays, since receipts name it."""
    price, known = founding.price, tx.deployments.list()
    revision = max((row.revision for row in known), default=0) + 1
    wanted = DeploymentRow(
        model=founding.manifest.name,
        digest=founding.manifest.digest,
        manifest=envelope.encode(founding.manifest),
        slots=founding.slots,
        input_micro_per_mtok=price.input_micro_per_mtok,
        output_micro_per_mtok=price.output_micro_per_mtok,
        fee_basis_points=price.fee_basis_points,
        revision=revision,
    )
    changed = [
        dataclasses.replace(row, retired=True, revision=revision)
        for row in known
        if row.digest != wanted.digest and not row.retired
    ]
    present = tx.deployments.get(wanted.digest)
    if present is None or dataclasses.replace(present, revision=revision) != wanted:
        changed.append(wanted)
    for row in changed:
        tx.deployments.put(row)
        events.record(
            tx, now_ms, "deployment_changed", row.model, revision=row.revision, retired=row.retired
        )
