"""How a pool on this machine is founded: names and keys that every later start finds again."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Final

import msgspec

from potluck.adapters.ids import UlidIds
from potluck.adapters.keys import write_private
from potluck.cli import builtin_model
from potluck.cli.failures import CommandError, usage
from potluck.cli.folder import DataFolder
from potluck.core.ids import AccountId, CoordinatorId, Digest, KeyId
from potluck.messages.membership import Manifest, Source

POOL: Final = "home"
_KEY_BYTES: Final = 32
_GGUF: Final = b"GGUF"
_OTHER_MODEL: Final = "give a GGUF file with --model, or none for the built-in model"


class PoolFile(msgspec.Struct, kw_only=True):
    """`<data>/pool.json`."""

    pool: str
    coordinator: CoordinatorId
    owner: AccountId
    provider: AccountId
    key: KeyId
    key_hash: str
    manifest: Manifest
    slots: int


class CredentialsFile(msgspec.Struct, kw_only=True):
    """`<data>/credentials.json`: what a client needs."""

    url: str
    api_key: str
    account: AccountId


def found(folder: DataFolder, model: Path | None) -> PoolFile:
    """The pool of this folder, made on the first start. Raises `CommandError`."""
    manifest = builtin_model.SMOLLM2 if model is None else local_manifest(model)
    try:
        pool = read(folder)
        pool.manifest = manifest
    except FileNotFoundError:
        pool = _new(folder, manifest)
    except msgspec.MsgspecError as error:
        raise CommandError(
            f"{folder.founding} is damaged: {error}", "restore it from a backup"
        ) from error
    _write(folder.founding, pool)
    return pool


def read(folder: DataFolder) -> PoolFile:
    """As the last `up` wrote it. Raises `OSError` or `msgspec.MsgspecError`."""
    return msgspec.json.decode(folder.founding.read_bytes(), type=PoolFile)


def remember_url(folder: DataFolder, url: str) -> CredentialsFile:
    credentials = read_credentials(folder.credentials)
    credentials.url = url
    _write(folder.credentials, credentials)
    return credentials


def read_credentials(path: Path) -> CredentialsFile:
    """Raises `FileNotFoundError` or `CommandError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CredentialsFile)
    except msgspec.MsgspecError as error:
        raise CommandError(f"{path} is damaged: {error}", "give --url and --api-key") from error


def check_model(model: Path) -> None:
    """Whether it can be one, without reading all of it. Raises `CommandError`."""
    try:
        with model.open("rb") as file:
            if file.read(len(_GGUF)) != _GGUF:
                raise usage(f"{model} is no GGUF file", _OTHER_MODEL, "invalid_setting")
    except OSError as error:
        raise _unreadable(model, error) from error


def _unreadable(model: Path, error: OSError) -> CommandError:
    return usage(
        f"the model {model} cannot be read: {error.strerror}", _OTHER_MODEL, "invalid_setting"
    )


def local_manifest(model: Path) -> Manifest:
    """Names a GGUF file on this machine by its bytes. Raises `CommandError`."""
    check_model(model)
    try:
        with model.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = model.stat().st_size
    except OSError as error:
        raise _unreadable(model, error) from error
    return Manifest(
        name=model.stem.lower(),
        digest=Digest(digest),
        size_bytes=size_bytes,
        format="gguf",
        sources=(Source(kind="path", location=str(model)),),
        context_tokens=builtin_model.SMOLLM2.context_tokens,
        # Weights, and room for the context's cache beside them.
        memory_bytes=2 * size_bytes + builtin_model.SMOLLM2.memory_bytes,
        redundancy_class=f"llama.cpp/{digest[:12]}",
        licence="unknown",
    )


def _new(folder: DataFolder, manifest: Manifest) -> PoolFile:
    ids = UlidIds()
    owner = AccountId(f"acc_{ids.ulid()}")
    secret = base64.urlsafe_b64encode(ids.secret(_KEY_BYTES)).rstrip(b"=").decode()
    api_key = f"pk_{secret}"
    _write(folder.credentials, CredentialsFile(url="", api_key=api_key, account=owner))
    return PoolFile(
        pool=POOL,
        coordinator=CoordinatorId(f"co_{ids.ulid()}"),
        owner=owner,
        provider=AccountId(f"acc_{ids.ulid()}"),
        key=KeyId(f"key_{ids.ulid()}"),
        key_hash=hashlib.sha256(api_key.encode()).hexdigest(),
        manifest=manifest,
        slots=builtin_model.SLOTS,
    )


def _write(path: Path, content: msgspec.Struct) -> None:
    text = json.dumps(msgspec.to_builtins(content), indent=2)
    write_private(path, text.encode() + b"\n")
