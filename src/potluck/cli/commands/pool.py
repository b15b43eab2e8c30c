"""`status`, `nodes`, `models`, `balance`: what the pool is, and what one has in it."""

import time

import typer
from rich.markup import escape

from potluck.cli import connection, output, sweep
from potluck.cli.connection import ApiKey, DataDir, Json, Url
from potluck.core import parameters
from potluck.messages import views


def register(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(nodes)
    app.command()(models)
    app.command()(balance)


def status(
    data_dir: DataDir = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Whether the pool is well."""
    with connection.connect(data_dir, url, api_key) as client:
        found = client.status()
    if as_json:
        output.json_line(found)
        return
    say = output.screen.print
    books = "[green]balance[/]" if found.books_balance else "[bold red]DO NOT BALANCE[/]"
    say(f"Pool [bold]{escape(found.pool)}[/], Potluck {escape(found.version)}")
    say(
        f"Nodes: {found.nodes_alive} alive, {found.nodes_suspect} suspect, {found.nodes_dead} dead"
        + (" [yellow](mass silence: nobody is given up)[/]" if found.evictions_frozen else "")
    )
    say(f"Replicas ready: {found.replicas_ready}")
    say(f"Accounts: {found.accounts}, open holds: {found.holds_open}, receipts: {found.receipts}")
    say(f"The books {books}.")
    state = sweep.read_state(connection.folder(data_dir)) if url is None else None
    if state is not None and any(state.restarts.values()):
        again = ", ".join(f"{name} {count}x" for name, count in state.restarts.items() if count)
        say(f"Restarted since `up`: {escape(again)}")


def nodes(
    data_dir: DataDir = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """The machines of the pool, and what each serves."""
    with connection.connect(data_dir, url, api_key) as client:
        found = sorted(client.nodes(), key=lambda node: node.name)
    if as_json:
        output.json_line(found)
        return
    if not found:
        output.screen.print("No node has joined yet.")
        return
    columns = ("~node", "state", "sandbox", "~has", "~serves (requests/slots)")
    now_s = time.time()
    output.table(columns, [_node_row(one, now_s) for one in found])
    for node in found:
        for replica in node.replicas if node.liveness == "alive" else ():
            if replica.state == "failed":
                why = f"{node.name} cannot serve {replica.model}: {output.reason(replica.detail)}"
                output.screen.print(f"[red]{escape(why)}[/]. It tries again by itself.")
    for reason in sorted({node.tier_reason for node in found if node.tier != "full"}):
        names = ", ".join(node.name for node in found if node.tier_reason == reason)
        output.screen.print(f"Sandbox of {escape(names)}: {escape(reason)}.")


def _node_row(node: views.NodeView, now_s: float) -> tuple[str, ...]:
    """What a silent node last said of itself may be true no more: it is shown as past, or not."""
    has = [output.count(node.cpu_cores, "core")]
    if node.liveness == "alive":
        has.append(f"{output.size(node.memory_free_bytes)} free")
        serves = [output.replica(replica) for replica in node.replicas] or ["nothing yet"]
    else:
        serves = [f"last heard {output.ago(node.heard_ms, now_s)}"]
        serves += [f"before that: {output.replica(replica)}" for replica in node.replicas]
    has += [f"{card.name} {output.size(card.memory_bytes)}" for card in node.accelerators]
    return (node.name, node.liveness, node.tier, ", ".join(has), "\n".join(serves))


def models(
    data_dir: DataDir = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """What can be asked for, and its price."""
    with connection.connect(data_dir, url, api_key) as client:
        found = client.models()
    if as_json:
        output.json_line(found)
        return
    if not found:
        output.screen.print("No model is served.")
        return
    output.screen.print("Prices: compute credits for a million tokens; the fee comes on top.")
    columns = ("~model", ">replicas", ">context", ">size", "~licence", ">in", ">out", ">fee")
    output.table(columns, [_model_row(model) for model in found])


def _model_row(model: views.ModelView) -> tuple[str, ...]:
    return (
        model.id,
        f"{model.replicas_ready}/{model.replicas_wanted}",
        f"{model.context_tokens:,}",
        output.size(model.size_bytes),
        model.licence,
        output.price(model.input_micro_per_mtok),
        output.price(model.output_micro_per_mtok),
        f"{model.fee_basis_points / 100:g} %",
    )


def balance(
    data_dir: DataDir = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """What your account has, and what is on hold."""
    with connection.connect(data_dir, url, api_key) as client:
        account = client.account(client.whoami().account)
        holds = [one for one in client.holds() if one.account == account.id]
        lines = client.ledger(limit=10)
    if as_json:
        output.json_line({"account": account, "holds": holds, "ledger": lines})
        return
    say = output.screen.print
    say(f"Account [bold]{escape(account.name)}[/] ({account.id})")
    say(f"  posted     {output.credits(account.posted_micro):>16} credits")
    say(f"  on hold    {output.credits(account.pending_micro):>16}")
    say(f"  available  [bold]{output.credits(account.available_micro):>16}[/]")
    if holds:
        say("")
        columns = ("hold", ">set aside", "expires", "free at the latest")
        output.table(columns, [_hold_row(hold) for hold in holds])
        idle = output.count(parameters.hold_life_ms // 60_000, "minute")
        say(f"Holds are money set aside for your next requests; unused for {idle}, they are freed.")
    if lines:
        say("")
        ledger(lines)


def _hold_row(hold: views.HoldView) -> tuple[str, ...]:
    """Its two ends are the JSON's `expires_ms` and `released_at_latest_ms`."""
    ends = (hold.expires_ms, hold.released_at_latest_ms)
    rest = output.credits(hold.amount_micro - hold.settled_micro)
    return (output.short(hold.id), rest, *map(output.moment, ends))


def ledger(lines: list[views.TransferView]) -> None:
    columns = ("when", "~kind", "from", "to", ">credits", "for")
    output.table(columns, [_ledger_row(line) for line in lines])


def _ledger_row(line: views.TransferView) -> tuple[str, ...]:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(line.at_ms / 1000))
    return (
        when, line.kind.replace("_", " "), output.short(line.payer), output.short(line.payee),
        output.credits(line.amount_micro), output.short(line.cause),
    )  # fmt: skip
