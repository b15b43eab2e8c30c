"""Which pool a command talks to: flags, else the environment, else the pool of the data folder."""

import os
from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import founding, settings
from potluck.cli.failures import CommandError
from potluck.cli.folder import DataFolder
from potluck.client.client import Client
from potluck.messages import errors

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="The pool's folder. [POTLUCK_DATA_DIR, else ~/.potluck]"),
]
Url = Annotated[str | None, typer.Option("--url", help="The pool's address. [POTLUCK_URL]")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="The key to use. [POTLUCK_API_KEY]")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def folder(data_dir: Path | None) -> DataFolder:
    return DataFolder((data_dir or settings.default_folder()).expanduser().absolute())


def connect(data_dir: Path | None, url: str | None, api_key: str | None) -> Client:
    """Raises `CommandError` if it is not known where to, or as whom."""
    url = url or os.environ.get("POTLUCK_URL")
    api_key = api_key or os.environ.get("POTLUCK_API_KEY")
    if url is None or api_key is None:
        here = folder(data_dir)
        try:
            known = founding.read_credentials(here.credentials)
        except FileNotFoundError:
            raise CommandError(
                f"there is no pool in {here.root}",
                "start one with `potluck up`, or give --url and --api-key",
                code="not_found",
                exit_code=errors.NOT_FOUND,
            ) from None
        except OSError as error:
            raise CommandError(
                f"{here.credentials}: {error.strerror}", "run as its owner"
            ) from error
        url, api_key = url or known.url, api_key or known.api_key
    return Client(url, api_key)
