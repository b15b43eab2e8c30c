"""Which pool a command talks to: flags, else the environment, else the pool of the data folder."""

import ipaddress
import os
from pathlib import Path
from typing import Annotated

import httpx
import typer

from potluck.cli import founding, settings
from potluck.cli.failures import CommandError, usage
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
    address = _address(url) if url is not None else None
    if address is None or api_key is None:
        if address is not None and not _here(address):
            # The key of the pool on this machine is an admin's: it is shown to no other.
            raise usage(f"no key is given for {address}", "give --api-key or POTLUCK_API_KEY")
        known = _known(folder(data_dir))
        address, api_key = address or known.url, api_key or known.api_key
    if not (api_key.isascii() and api_key.isprintable()):
        raise usage("the API key has letters that no key has", "copy it again, whole")
    return Client(address, api_key)


def _known(here: DataFolder) -> founding.CredentialsFile:
    try:
        return founding.read_credentials(here.credentials)
    except FileNotFoundError:
        raise CommandError(
            f"there is no pool in {here.root}",
            "start one with `potluck up`, or give --url and --api-key",
            code="not_found",
            exit_code=errors.NOT_FOUND,
        ) from None
    except OSError as error:
        raise CommandError(f"{here.credentials}: {error.strerror}", "run as its owner") from error


def _here(address: str) -> bool:
    """Whether it is this machine's own."""
    host = httpx.URL(address).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(url: str) -> str:
    """OpenAI clients are given the address with `/v1`, so that is understood too."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL("")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise usage(f"--url cannot be {url!r}", "give it as http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")
