"""`keys`: who may ask, and for how long."""

import time
from typing import Annotated

import typer
from rich.markup import escape

from potluck.cli import connection, output
from potluck.cli.connection import ApiKey, DataDir, Json, Url
from potluck.core import parameters
from potluck.messages import views


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="API keys: list, create, revoke.",
        callback=output.help_without_command,
        invoke_without_command=True,
    )
    group.command("list")(show)
    group.command("create")(create)
    group.command("revoke")(revoke)
    app.add_typer(group, name="keys")


def show(
    data_dir: DataDir = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Your keys by name; what they are made of is not kept."""
    with connection.connect(data_dir, url, api_key) as client:
        found = client.keys()
    if as_json:
        output.json_line(found)
        return
    columns, rows = ["key", "~name", "account", "rights", "~state"], [_row(key) for key in found]
    if len({key.account for key in found}) == 1:
        # All are the reader's own, and an id is wide.
        for row in (columns, *rows):
            del row[2]
    output.table(columns, rows)


def _row(key: views.KeyView) -> list[str]:
    rights = "admin" if key.admin else "use"
    return [key.id, key.name, output.short(key.account), rights, _state(key)]


def _state(key: views.KeyView) -> str:
    if key.revoked_ms is not None:
        return "revoked"
    if key.expires_ms is None:
        return "valid"
    if key.expires_ms <= time.time() * 1000:
        return "expired"
    return f"until {output.moment(key.expires_ms)}"


def create(
    name: Annotated[str, typer.Argument(help="What it is for.")],
    account: Annotated[str | None, typer.Option(help="Whose; for admins. [your own]")] = None,
    life: Annotated[
        int | None,
        typer.Option(
            min=1, max=parameters.key_life_s_max, help="Seconds until it expires. [never]"
        ),
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Make an ordinary key: it asks and sees its own account."""
    with connection.connect(data_dir, url, api_key) as client:
        made = client.create_key(name, account=account, life_s=life)
    if as_json:
        output.json_line(made)
        return
    output.line(made.key, style="bold")
    output.note(f"Key {made.id}; keep it now, it cannot be shown again.")


def revoke(
    key: Annotated[str, typer.Argument(help="Its id, as `potluck keys list` shows it.")],
    data_dir: DataDir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """End a key at once."""
    with connection.connect(data_dir, url, api_key) as client:
        revoked = client.revoke_key(key)
    if as_json:
        output.json_line(revoked)
        return
    output.screen.print(f"{escape(revoked.id)} is revoked.")
