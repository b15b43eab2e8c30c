"""`chat`: one question, or a conversation, answered by the pool."""

import sys
from typing import Annotated, Any

import typer
from rich.markup import escape

from potluck.cli import connection, output
from potluck.cli.connection import ApiKey, DataDir, Json, Url
from potluck.cli.failures import CommandError
from potluck.client.client import Answer, Client
from potluck.messages import errors


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="The question; without it, a conversation begins.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="[the first that is served]")] = None,
    system: Annotated[str | None, typer.Option(help="What the model should be.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    data_dir: DataDir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Ask a model of the pool."""
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    history = [{"role": "system", "content": system}] if system else []
    with connection.connect(data_dir, url, api_key) as client:
        options["model"] = model or _first_model(client)
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read()
        if prompt is not None:
            _ask(client, options, [*history, {"role": "user", "content": prompt}], as_json)
        elif as_json:
            raise CommandError("--json needs a prompt", "give one", exit_code=errors.USAGE)
        else:
            _converse(client, options, history)


def _converse(client: Client, options: dict[str, Any], history: list[dict[str, str]]) -> None:
    output.screen.print(f"Talking to {escape(options['model'])}; Ctrl-D ends.")
    while True:
        try:
            prompt = output.screen.input("[bold]> [/]")
        except EOFError:
            output.screen.print()
            return
        if prompt.strip():
            history.append({"role": "user", "content": prompt})
            history.append({"role": "assistant", "content": _ask(client, options, history, False)})


def _ask(
    client: Client, options: dict[str, Any], messages: list[dict[str, str]], as_json: bool
) -> str:
    parts: list[str] = []
    with client.chat({**options, "messages": messages}) as answer:
        for text in answer:
            parts.append(text)
            if not as_json:
                sys.stdout.write(text)
                sys.stdout.flush()
    if as_json:
        output.json_line(
            {
                "model": options["model"],
                "text": "".join(parts),
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
                "receipt": answer.receipt,
                "node": answer.node,
            }
        )
    else:
        sys.stdout.write("\n")
        output.errors.print(_bill(answer), style="dim")
    return "".join(parts)


def _bill(answer: Answer) -> str:
    tokens = f"{answer.usage.get('prompt_tokens', 0)} + {answer.usage.get('completion_tokens', 0)}"
    return escape(f"{tokens} tokens, receipt {answer.receipt}")


def _first_model(client: Client) -> str:
    served = client.models()
    if not served:
        raise CommandError(
            "the pool serves no model", "wait for a node", exit_code=errors.NO_CAPACITY
        )
    return served[0].id
