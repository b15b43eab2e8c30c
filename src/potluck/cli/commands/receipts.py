"""`receipt`: what one answer cost, and the proof of it."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from potluck.adapters.keys import Ed25519Verifier
from potluck.cli import connection, output
from potluck.cli.commands import pool
from potluck.cli.connection import ApiKey, DataDir, Json, Url
from potluck.cli.failures import CommandError
from potluck.client import receipts
from potluck.messages import errors
from potluck.messages.views import ReceiptLineView, ReceiptView


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Receipts: list, show, verify.",
        callback=output.help_without_command,
        invoke_without_command=True,
    )
    group.command("list")(listing)
    group.command("show")(show)
    group.command("verify")(verify)
    app.add_typer(group, name="receipt")


def listing(
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    data_dir: DataDir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Your newest receipts."""
    with connection.connect(data_dir, url, api_key) as client:
        found = client.receipts(limit)
    if as_json:
        output.json_line(found)
        return
    if not found:
        output.screen.print("No receipt yet: each answer gives one.")
        return
    columns = ("receipt", "~outcome", ">tokens", ">credits", "~model")
    output.table(columns, [_row(line) for line in found])


def _row(line: ReceiptLineView) -> tuple[str, ...]:
    tokens = f"{line.prompt_tokens}+{line.completion_tokens}"
    cost = output.credits(line.total_micro)
    outcome = f"refused: {line.refusal}" if line.refusal else line.outcome
    return (line.id, outcome, tokens, cost, line.model)


def show(
    receipt: Annotated[str, typer.Argument(help="Its id: header x-potluck-receipt.")],
    data_dir: DataDir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """A receipt and its ledger lines. With --json: the document that `verify` checks."""
    with connection.connect(data_dir, url, api_key) as client:
        found = client.receipt(receipt)
        lines = [] if as_json else client.ledger(cause=receipt)
    if as_json:
        output.json_line(found)
        return
    _print(found)
    if lines:
        pool.ledger(lines)


def _print(found: ReceiptView) -> None:
    say = output.screen.print
    say(f"[bold]Receipt[/] {found.id}: {escape(found.outcome)}")
    say(f"  model    {escape(found.model)} on {escape(found.node_name)}, sandbox {found.tier}")
    say(
        f"  tokens   {found.prompt_tokens} in, {found.completion_tokens} out; "
        f"{found.queue_ms} ms queued, {found.prefill_ms} ms reading, {found.decode_ms} ms writing"
    )
    say(
        f"  price    {output.credits(found.provider_micro)} to the provider "
        f"+ {output.credits(found.fee_micro)} fee = [bold]{output.credits(found.total_micro)}[/]"
    )
    signed = "by node and gateway" if found.countersigned else "by the node; gateway's is missing"
    say(f"  signed   {signed}")
    if found.refusal:
        say(f"  [bold red]not paid:[/] {escape(found.refusal)}")


def verify(
    file: Annotated[Path, typer.Argument(help="What `receipt show --json` wrote; `-` for stdin.")],
    as_json: Json = False,
) -> None:
    """Check a receipt offline. Exit code 6 if any part of it does not hold."""
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        view = msgspec.json.decode(content, type=ReceiptView)
    except OSError as error:
        raise CommandError(
            f"{file}: {error.strerror}", "give a file", exit_code=errors.NOT_FOUND
        ) from error
    except msgspec.MsgspecError as error:
        raise CommandError(
            f"{file} is no receipt: {error}",
            "write one with `potluck receipt show ID --json`",
            code="malformed",
            exit_code=errors.REFUSED,
        ) from error
    checks = receipts.verify(view, Ed25519Verifier())
    holds = all(check.ok for check in checks)
    if as_json:
        output.json_line({"id": view.id, "valid": holds, "checks": [
            {"name": check.name, "ok": check.ok, "detail": check.detail} for check in checks
        ]})  # fmt: skip
    else:
        for check in checks:
            mark = "[green]✓[/]" if check.ok else "[bold red]✗[/]"
            output.screen.print(f"{mark} {escape(check.name)}: {escape(check.detail)}")
        verdict = "[bold green]The receipt holds.[/]" if holds else "[bold red]It does not hold.[/]"
        output.screen.print(verdict)
    if not holds:
        raise typer.Exit(errors.REFUSED)
