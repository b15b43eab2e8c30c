"""`chat`: one question, or a conversation, answered by the pool."""

import shutil
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from potluck.cli import connection, mends, output
from potluck.cli.connection import ApiKey, DataDir, Json, Url
from potluck.cli.failures import CommandError, usage
from potluck.cli.wrapping import Wrapping
from potluck.client.client import Answer, Client
from potluck.core.refusals import Refusal
from potluck.messages import errors

_ASK: Final = 'ask one: `potluck chat "What is a pool?"`'


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="The question; without it, a conversation begins.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Which to ask. [the first that is served]")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model should be.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The answer's length at most.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0: the likeliest answer each time.")
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Ask a model of the pool."""
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    history = [{"role": "system", "content": system}] if system else []
    prompt = _question(prompt)
    if prompt is None and as_json:
        raise usage("--json needs a question", _ASK)
    with connection.connect(data_dir, url, api_key) as client:
        options["model"] = model or _first_model(client)
        if prompt is not None:
            _ask(client, options, [*history, {"role": "user", "content": prompt}], as_json)
        else:
            _converse(client, options, history)


def _question(prompt: str | None) -> str | None:
    """As it was typed or piped in; None: somebody sits there to converse with."""
    try:
        if prompt is None:
            if sys.stdin is not None and sys.stdin.isatty():
                return None
            prompt = sys.stdin.read() if sys.stdin is not None else ""
        prompt.encode()
    except UnicodeError:
        raise usage("the question is no text", "give it as UTF-8") from None
    if not prompt.strip():
        raise usage("the question is empty", _ASK)
    return prompt


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
    shown = _on_a_terminal() if sys.stdout.isatty() else _raw
    with client.chat({**options, "messages": messages}) as answer:
        for text in answer:
            parts.append(text)
            if not as_json:
                sys.stdout.write(shown(text))
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
        output.note(_bill(answer))
    return "".join(parts)


def _bill(answer: Answer) -> str:
    tokens = f"{answer.usage.get('prompt_tokens', 0)} + {answer.usage.get('completion_tokens', 0)}"
    return f"{tokens} tokens, receipt {answer.receipt}"


def _on_a_terminal() -> Callable[[str], str]:
    return Wrapping(lambda: shutil.get_terminal_size().columns).feed


def _raw(text: str) -> str:
    """For files and pipes: as the model said it."""
    return text


def _first_model(client: Client) -> str:
    served = client.models()
    if not served:
        raise CommandError(
            "the pool serves no model",
            mends.mend(Refusal.NO_CAPACITY),
            code=Refusal.NO_CAPACITY,
            exit_code=errors.NO_CAPACITY,
        )
    return served[0].id
