"""`keys`: who may ask, and for how long."""

import time
from typing import Annotated

import typer
from rich.markup import escape

from potluck.cli import connection, output
from potluck.cli.connection import ApiKey, DataDir, Json, Url
from potluck.messages import views


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="API keys: list, create, revoke.", no_args_is_help=True)
    group.command("list")(show)
    group.command("create")(create)
    group.command("revoke")(revoke)
    app.add_typer(group, name="keys")


def show(
    data_dir: DataDir = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """All keys you may see; never the keys themselves, which are not kept."""
    with connection.connect(data_dir, url, api_key) as client:
        found = client.keys()
    if as_json:
        output.json_line(found)
        return
    output.table(("key", "name", "account", "rights", "state"), [_row(key) for key in found])


def _row(key: views.KeyView) -> tuple[str, ...]:
    rights = "admin" if key.admin else "use"
    return (key.id, key.name, output.short(key.account), rights, _state(key))


def _state(key: views.KeyView) -> str:
    if key.revoked_ms is not None:
        return "revoked"
    if key.expires_ms is None:
        return "valid"
    if key.expires_ms <= time.time() * 1000:
        return "expired"
    until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(key.expires_ms / 1000))
    return f"valid until {until}"


def create(
    name: Annotated[str, typer.Argument(help="What it is for.")],
    account: Annotated[str | None, typer.Option(help="Whose; for admins. [your own]")] = None,
    life: Annotated[
        int | None, typer.Option(min=1, help="Seconds until it expires. [never]")
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Make a key. It is shown this once."""
    with connection.connect(data_dir, url, api_key) as client:
        made = client.create_key(name, account=account, life_s=life)
    if as_json:
        output.json_line(made)
        return
    output.screen.print(f"[bold]{escape(made.key)}[/]")
    output.errors.print(f"Key {made.id}; keep it now, it cannot be shown again.", style="dim")


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
