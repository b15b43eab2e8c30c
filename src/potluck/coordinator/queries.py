"""Reads: what `/api/v1` shows, as JSON. No read changes anything.

Live facts (liveness, reports, replicas) come from this coordinator's memory by way of `Live`.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

import potluck
from potluck.coordinator import commands, settlement
from potluck.coordinator.membership import Member
from potluck.core import parameters
from potluck.core.ids import AccountId, CoordinatorId, Digest, NodeId, ReceiptId
from potluck.core.refusals import Refusal
from potluck.messages import membership, queries, views
from potluck.messages import money as words
from potluck.messages.membership import Manifest, ReplicaReport
from potluck.messages.queries import Answer, Query
from potluck.ports.store import (
    CountersignatureRow,
    DeploymentRow,
    HoldRow,
    ReceiptRow,
    TransferRow,
    Tx,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    pool: str
    coordinator: CoordinatorId
    members: Mapping[NodeId, Member]
    ready_of: Callable[[Digest], int]
    ready: int
    frozen: bool
    books_balance: bool
    """When last looked up."""
    now_ms: int
    """Monotonic."""
    wall_ms: int


No = tuple[Refusal, str]
Reader = Callable[[Tx, dict[str, str], Live], object]


def read(tx: Tx, query: Query, live: Live) -> Answer | None:
    """None: this database is not yet at the offset that is asked for."""
    offset = tx.events.last_offset()
    if offset < query.at_least_offset:
        if query.at_least_offset > offset + parameters.offset_ahead_max:
            message = f"the feed is at {offset}, and will not be there soon"
            return Answer(Refusal.COORDINATOR_UNAVAILABLE, offset, b"", message)
        return None
    found = _READERS[query.what](tx, query.args, live)
    if isinstance(found, tuple):
        return Answer(refusal=found[0], offset=offset, data=b"", message=found[1])
    data = _page(found, offset) if isinstance(found, list) else msgspec.json.encode(found)
    return Answer(refusal="", offset=offset, data=data)


def _page(rows: list[msgspec.Struct], offset: int) -> bytes:
    """As many of the rows as one answer may carry."""
    parts: list[msgspec.Raw] = []
    size_bytes = 0
    for row in rows:
        part = msgspec.json.encode(row)
        size_bytes += len(part)
        if size_bytes > parameters.answer_bytes_max:
            break
        parts.append(msgspec.Raw(part))
    return msgspec.json.encode(views.Page(data=parts, offset=offset))


def _key(tx: Tx, args: dict[str, str], live: Live) -> queries.KeyRecord | No:
    row = tx.keys.by_hash(args.get("hash", ""))
    if row is None:
        return Refusal.INVALID_KEY, "no such key"
    if row.revoked_ms is not None:
        return Refusal.REVOKED_KEY, "this key was revoked"
    lives_ms = None if row.expires_ms is None else row.expires_ms - live.wall_ms
    if lives_ms is not None and lives_ms <= 0:
        return Refusal.EXPIRED_KEY, "this key has expired"
    return queries.KeyRecord(
        id=row.id,
        account=row.account,
        expires_ms=row.expires_ms,
        lives_ms=lives_ms,
        admin=row.admin,
    )


def _nodes(tx: Tx, _args: dict[str, str], live: Live) -> list[views.NodeView]:
    served = {
        row.digest: membership.manifest_decoder.decode(row.manifest)
        for row in tx.deployments.list()
    }
    return [_node_view(live.members[node], served, live) for node in sorted(live.members)]


def _node_view(member: Member, served: Mapping[Digest, Manifest], live: Live) -> views.NodeView:
    row, report = member.row, member.report
    inventory = _inventory_decoder.decode(row.inventory)
    dead = member.node.liveness == "dead"
    return views.NodeView(
        id=row.id,
        name=row.name,
        liveness=member.node.liveness,
        account=row.account,
        tier=row.tier,
        tier_reason=row.tier_reason,
        version=row.version,
        hostname=inventory.hostname,
        os=inventory.os,
        arch=inventory.arch,
        cpu_model=inventory.cpu_model,
        cpu_cores=inventory.cpu_cores,
        cpu_percent=0.0 if report is None else report.cpu_percent,
        memory_bytes=inventory.memory_bytes,
        memory_free_bytes=0 if report is None else report.memory_free_bytes,
        disk_free_bytes=inventory.disk_free_bytes if report is None else report.disk_free_bytes,
        accelerators=[
            views.AcceleratorView(kind=one.kind, name=one.name, memory_bytes=one.memory_bytes)
            for one in inventory.accelerators
        ],
        replicas=[] if report is None or dead else [
            _replica_view(one, served.get(one.digest))
            for one in report.replicas
        ],
        receipts_waiting=0 if report is None else report.receipts_waiting,
        heard_ms=live.wall_ms - (live.now_ms - member.node.heard_ms),
        joined_ms=row.joined_ms,
    )  # fmt: skip


def _replica_view(report: ReplicaReport, manifest: Manifest | None) -> views.ReplicaView:
    return views.ReplicaView(
        model="" if manifest is None else manifest.name,
        digest=report.digest,
        state=report.state,
        slots=report.slots,
        in_flight=report.in_flight,
        context_tokens=report.context_tokens,
        detail=report.detail,
        fetched_bytes=report.fetched_bytes,
        size_bytes=0 if manifest is None else manifest.size_bytes,
    )


def _models(tx: Tx, _args: dict[str, str], live: Live) -> list[views.ModelView]:
    wanted = sum(member.node.liveness != "dead" for member in live.members.values())
    return [_model_view(row, live, wanted) for row in tx.deployments.list() if not row.retired]


def _model_view(row: DeploymentRow, live: Live, wanted: int) -> views.ModelView:
    manifest = membership.manifest_decoder.decode(row.manifest)
    return views.ModelView(
        id=row.model,
        digest=row.digest,
        size_bytes=manifest.size_bytes,
        format=manifest.format,
        licence=manifest.licence,
        context_tokens=manifest.context_tokens,
        memory_bytes=manifest.memory_bytes,
        redundancy_class=manifest.redundancy_class,
        input_micro_per_mtok=row.input_micro_per_mtok,
        output_micro_per_mtok=row.output_micro_per_mtok,
        fee_basis_points=row.fee_basis_points,
        replicas_ready=live.ready_of(row.digest),
        replicas_wanted=wanted,
    )


def _accounts(tx: Tx, args: dict[str, str], _live: Live) -> list[views.AccountView] | No:
    """All, or the one that is named: who may see only his own is shown no other."""
    account = _account_of(tx, args)
    if isinstance(account, tuple):
        return account
    rows = tx.accounts.list(parameters.list_page_max) if account is None else ()
    if account is not None and (own := tx.accounts.get(account)) is not None:
        rows = (own,)
    return [commands.account_view(tx, row) for row in rows]


def _account(tx: Tx, args: dict[str, str], _live: Live) -> views.AccountView | No:
    row = tx.accounts.get(AccountId(args.get("account", "")))
    if row is None:
        return Refusal.ACCOUNT_NOT_FOUND, "no such account"
    return commands.account_view(tx, row)


def _keys(tx: Tx, args: dict[str, str], _live: Live) -> list[views.KeyView] | No:
    account = _account_of(tx, args)
    if isinstance(account, tuple):
        return account
    return [commands.key_view(row) for row in tx.keys.list(account, parameters.list_page_max)]


def _receipt(tx: Tx, args: dict[str, str], live: Live) -> views.ReceiptView | No:
    row = tx.receipts.get(ReceiptId(args.get("receipt", "")))
    if row is None or ("account" in args and row.account != args["account"]):
        return Refusal.RECEIPT_NOT_FOUND, "no such receipt, or it is not settled yet"
    return _receipt_view(tx, row, live)


def _receipt_view(tx: Tx, row: ReceiptRow, live: Live) -> views.ReceiptView:
    said = words.receipt_decoder.decode(row.body)
    member = live.members.get(row.node)
    models = {one.digest: one.model for one in tx.deployments.list()}
    countersigned = tx.countersignatures.get(row.request, row.attempt, row.gateway)
    view = views.ReceiptView(
        id=row.id,
        request=row.request,
        attempt=row.attempt,
        account=row.account,
        node=row.node,
        node_name="" if member is None else member.row.name,
        gateway=row.gateway,
        hold=row.hold,
        model=models.get(said.model, ""),
        model_digest=said.model,
        engine_digest=said.engine,
        tier=said.tier,
        outcome=said.outcome,
        prompt_tokens=said.prompt_tokens,
        completion_tokens=said.completion_tokens,
        input_micro_per_mtok=said.price.input_micro_per_mtok,
        output_micro_per_mtok=said.price.output_micro_per_mtok,
        fee_basis_points=said.price.fee_basis_points,
        max_micro=said.max_micro,
        claimed_micro=said.provider_micro + said.fee_micro,
        provider_micro=row.provider_micro,
        fee_micro=row.fee_micro,
        total_micro=row.provider_micro + row.fee_micro,
        refusal=row.refusal,
        queue_ms=said.queue_ms,
        prefill_ms=said.prefill_ms,
        decode_ms=said.decode_ms,
        input_digest=said.input_digest,
        output_digest=said.output_digest,
        settled_ms=row.at_ms,
        signed=_signed(row, words.RECEIPTS_DOMAIN),
        countersigned=(
            None if countersigned is None else _signed(countersigned, words.COUNTERSIGN_DOMAIN)
        ),
        delivered_tokens=None if countersigned is None else countersigned.delivered_tokens,
    )
    view.checksum = views.checksum(view)
    return view


def _signed(row: ReceiptRow | CountersignatureRow, domain: bytes) -> views.SignedView:
    index, size, path = _path_decoder.decode(row.path)
    return views.SignedView(
        body=_base64(row.body),
        domain=_base64(domain),
        root=_base64(row.root),
        signature=_base64(row.signature),
        public_key=_base64(row.public_key),
        index=index,
        size=size,
        path=[_base64(one) for one in path],
    )


def _receipts(tx: Tx, args: dict[str, str], _live: Live) -> list[views.ReceiptLineView] | No:
    account = _account_of(tx, args)
    if isinstance(account, tuple):
        return account
    models = {one.digest: one.model for one in tx.deployments.list()}
    return [_line(row, models) for row in tx.receipts.list(account, _limit(args))]


def _line(row: ReceiptRow, models: Mapping[Digest, str]) -> views.ReceiptLineView:
    said = words.receipt_decoder.decode(row.body)
    return views.ReceiptLineView(
        id=row.id,
        request=row.request,
        attempt=row.attempt,
        account=row.account,
        node=row.node,
        model=models.get(said.model, said.model),
        outcome=said.outcome,
        prompt_tokens=said.prompt_tokens,
        completion_tokens=said.completion_tokens,
        total_micro=row.provider_micro + row.fee_micro,
        refusal=row.refusal,
        settled_ms=row.at_ms,
    )


def _ledger(tx: Tx, args: dict[str, str], _live: Live) -> list[views.TransferView] | No:
    account = _account_of(tx, args)
    if isinstance(account, tuple):
        return account
    if "cause" in args:
        caused = _caused_by(tx, args["cause"])
        return [_transfer_view(row) for row in caused if account in (None, row.payer, row.payee)]
    before_ms = args.get("before_ms", "")
    rows = tx.transfers.list(account, _limit(args), _whole(before_ms, 0) if before_ms else None)
    return [_transfer_view(row) for row in rows]


def _caused_by(tx: Tx, cause: str) -> list[TransferRow]:
    """A receipt's transfers are named after it; an account's own are among its latest."""
    if cause.startswith("rcp_"):
        names = [settlement.transfer_id(ReceiptId(cause), kind) for kind in settlement.KINDS]
        found = [row for name in names if (row := tx.transfers.get(name)) is not None]
        return sorted(found, key=lambda row: (row.at_ms, row.id))
    rows = tx.transfers.list(AccountId(cause), parameters.list_page_max)
    return [row for row in reversed(rows) if row.cause == cause]


def _transfer_view(row: TransferRow) -> views.TransferView:
    return views.TransferView(
        id=row.id,
        kind=row.kind,
        payer=row.payer,
        payee=row.payee,
        amount_micro=row.amount_micro,
        cause=row.cause,
        hold=row.hold,
        at_ms=row.at_ms,
    )


def _holds(tx: Tx, args: dict[str, str], _live: Live) -> list[views.HoldView] | No:
    account = _account_of(tx, args)
    if isinstance(account, tuple):
        return account
    if account is None:
        return [_hold_view(row) for row in tx.holds.list_open(parameters.list_page_max)]
    return [_hold_view(row) for row in tx.holds.open_of(account)]


def _hold_view(row: HoldRow) -> views.HoldView:
    hold = row.hold
    return views.HoldView(
        id=hold.id,
        account=hold.account,
        gateway=hold.gateway,
        amount_micro=hold.amount_micro,
        settled_micro=hold.settled_micro,
        expires_ms=hold.expires_ms,
        released_at_latest_ms=hold.expires_ms + parameters.hold_grace_ms,
        state=hold.state,
    )


def _events(tx: Tx, args: dict[str, str], _live: Live) -> list[views.EventView]:
    limit = max(1, min(_whole(args.get("limit", ""), 100), parameters.events_page_max))
    return [
        views.EventView(
            offset=row.offset,
            at_ms=row.at_ms,
            kind=row.kind,
            subject=row.subject,
            data=msgspec.Raw(row.data.encode()),
        )
        for row in tx.events.after(_whole(args.get("after", ""), 0), limit)
    ]


def _status(tx: Tx, _args: dict[str, str], live: Live) -> views.StatusView:
    states = [member.node.liveness for member in live.members.values()]
    return views.StatusView(
        pool=live.pool,
        version=potluck.__version__,
        coordinator=live.coordinator,
        nodes_alive=states.count("alive"),
        nodes_suspect=states.count("suspect"),
        nodes_dead=states.count("dead"),
        evictions_frozen=live.frozen,
        replicas_ready=live.ready,
        accounts=tx.accounts.count(parameters.rows_counted_max),
        holds_open=tx.holds.count_open(parameters.rows_counted_max),
        receipts=tx.receipts.count(),
        offset=tx.events.last_offset(),
        books_balance=live.books_balance,
    )


_READERS: dict[str, Reader] = {
    "key": _key,
    "nodes": _nodes,
    "models": _models,
    "accounts": _accounts,
    "account": _account,
    "keys": _keys,
    "receipt": _receipt,
    "receipts": _receipts,
    "ledger": _ledger,
    "holds": _holds,
    "events": _events,
    "status": _status,
}
_inventory_decoder = msgspec.msgpack.Decoder(membership.Inventory)
_path_decoder = msgspec.msgpack.Decoder(tuple[int, int, list[bytes]])


def _account_of(tx: Tx, args: dict[str, str]) -> AccountId | No | None:
    """The account that is asked about, None for all of them."""
    if not args.get("account"):
        return None
    row = tx.accounts.get(AccountId(args["account"]))
    return (Refusal.ACCOUNT_NOT_FOUND, "no such account") if row is None else row.id


def _limit(args: dict[str, str]) -> int:
    return min(max(1, _whole(args.get("limit", ""), 100)), parameters.list_page_max)


def _whole(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else default


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


_DIGITS = 19
