"""`potluck up`: a whole pool on this machine, from nothing or from where it stood."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import httpx
import msgspec

from potluck.adapters import cgroups, keys
from potluck.adapters.clock import SystemClock
from potluck.adapters.nats import credentials, server
from potluck.adapters.processes import LocalProcesses
from potluck.cli import founding, sweep
from potluck.cli.failures import CommandError
from potluck.cli.folder import DataFolder
from potluck.cli.founding import CredentialsFile, PoolFile
from potluck.cli.settings import UpSettings
from potluck.cli.supervisor import Child, Supervisor
from potluck.core import ids, parameters
from potluck.messages import errors
from potluck.messages.views import NodeView, Page
from potluck.ports.processes import SpawnError

_log = logging.getLogger(__name__)
_READY_POLL_MS: Final = 50
_LOG_TAIL_BYTES: Final = 2_000
LOOPBACK: Final = "127.0.0.1"


class Watcher(Protocol):
    """Whoever waits for a pool to be ready."""

    def show(self, reason: str, nodes: list[NodeView]) -> None: ...


class Pool:
    """A running pool, as `up` holds it."""

    def __init__(
        self, folder: DataFolder, settings: UpSettings, owner: CredentialsFile, kept: Supervisor
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.owner = owner
        self.supervisor = kept

    async def until_ready(self, watcher: "Watcher") -> None:
        """Returns once a request would succeed; `watcher` is told what is waited for."""
        headers = {"authorization": f"Bearer {self.owner.api_key}"}
        async with httpx.AsyncClient(base_url=self.owner.url, timeout=2, headers=headers) as client:
            while True:
                failing = self.supervisor.failing()
                if failing is not None:
                    raise _child_failed(self.folder, failing)
                try:
                    if await _ready(client, watcher):
                        return
                except (httpx.HTTPError, msgspec.MsgspecError):
                    watcher.show("The gateway is starting.", [])
                await asyncio.sleep(_READY_POLL_MS / 1000)


async def _ready(client: httpx.AsyncClient, watcher: Watcher) -> bool:
    answer = await client.get("/readyz")
    if answer.status_code == 200:
        return True
    shown = await client.get("/api/v1/nodes")
    nodes: list[NodeView] = []
    if shown.status_code == 200:
        nodes = msgspec.json.decode(shown.content, type=Page[NodeView]).data
    watcher.show(_reason(answer), sorted(nodes, key=lambda node: node.name))
    return False


def mistakes(folder: DataFolder, settings: UpSettings) -> list[CommandError]:
    """All that would keep a pool from starting, as far as it can be known before."""
    found: list[CommandError] = []
    try:
        with locked(folder):
            pass
    except CommandError as error:
        # A pool that runs here has its port, rightly.
        return [error]
    try:
        with _listening(settings.port):
            pass
    except CommandError as error:
        found.append(error)
    if settings.model is not None:
        try:
            founding.check_model(settings.model)
        except CommandError as error:
            found.append(error)
    return found


@asynccontextmanager
async def running(
    folder: DataFolder, settings: UpSettings, notice: Callable[[str], None]
) -> AsyncIterator[Pool]:
    """Starts all processes; on leaving, all are gone. Raises `CommandError`."""
    with locked(folder), _listening(settings.port) as listener:
        for swept in sweep.sweep(folder):
            notice(f"swept what an earlier run left: {swept}")
        folder.prepare()
        pool = founding.found(folder, settings.model)
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        owner = founding.remember_url(folder, url)
        supervisor: Supervisor

        def write_state() -> None:
            _write_state(folder, url, settings.nodes, supervisor)

        processes = LocalProcesses(use_cgroups=False)
        supervisor = Supervisor(processes, SystemClock(), write_state)
        try:
            authority = credentials.Authority(folder.nats_keys)
            bus_url = await _start_bus(folder, authority, supervisor)
            for child in _children(folder, settings, pool, listener, authority, bus_url):
                await supervisor.start(child)
            yield Pool(folder, settings, owner, supervisor)
        except (SpawnError, OSError, server.ServerMissingError) as error:
            raise CommandError(f"the pool cannot start: {error}", "see CONTRIBUTING.md") from error
        finally:
            await supervisor.stop()
            sweep.clear(folder)
            cgroups.sweep()


async def _start_bus(
    folder: DataFolder, authority: credentials.Authority, supervisor: Supervisor
) -> str:
    """Its URL. The server chooses a free port, and keeps it when it is started again."""
    server.write_config(folder.nats_config, port=server.ANY_PORT, authority=authority)
    await supervisor.start(_child(folder, "nats", server.argv(folder.nats_config)))
    while True:
        pid = supervisor.pids().get("nats")
        port = server.chosen_port(folder.nats_config, pid) if pid is not None else None
        if port is not None:
            server.write_config(folder.nats_config, port=port, authority=authority)
            return f"nats://{LOOPBACK}:{port}"
        if supervisor.failing() is not None:
            raise _child_failed(folder, "nats")
        await asyncio.sleep(_READY_POLL_MS / 1000)


def _child(folder: DataFolder, name: str, argv: list[str], *pass_fds: int) -> Child:
    log = folder.logs / f"{name}.log"
    return Child(name=name, argv=argv, env=_environment(), log=log, pass_fds=pass_fds)


def _children(
    folder: DataFolder,
    settings: UpSettings,
    pool: PoolFile,
    listener: socket.socket,
    authority: credentials.Authority,
    bus_url: str,
) -> Iterator[Child]:
    """All but the bus, in the order of their start."""

    def python(root: str, *arguments: str) -> list[str]:
        # -P: what lies in the folder where `up` was typed must not be imported.
        return [
            sys.executable,
            "-P",
            "-m",
            f"potluck.cli.roots.{root}",
            str(folder.root),
            *arguments,
        ]

    rights = credentials.coordinator_rights(pool.pool, pool.coordinator)
    _give(folder, authority, pool.coordinator, rights)
    observer = authority.observer(pool.coordinator)
    keys.write_private(folder.observer_credentials, observer)
    yield _child(folder, "coordinator", python("coordinator", bus_url))

    threads = max(1, len(os.sched_getaffinity(0)) // settings.nodes)
    for index in range(1, settings.nodes + 1):
        name = f"node-{index}"
        signer = keys.load_or_create(folder.node(name) / "identity.key")
        node = ids.node_id(signer.public_key)
        _give(folder, authority, node, credentials.node_rights(pool.pool, node))
        agent = _child(folder, name, python("agent", bus_url, name, str(threads)))
        yield replace(agent, grace_ms=parameters.node_grace_ms)

    # Last, so that it ends first: streams end while nodes still serve.
    signer = keys.load_or_create(folder.gateway / "identity.key")
    gateway = ids.gateway_id(signer.public_key)
    _give(folder, authority, gateway, credentials.gateway_rights(pool.pool, gateway))
    descriptor = listener.fileno()
    argv = python("gateway", bus_url, str(descriptor))
    yield _child(folder, "gateway", argv, descriptor)


def _give(
    folder: DataFolder,
    authority: credentials.Authority,
    identity: str,
    rights: credentials.Rights,
) -> None:
    keys.write_private(folder.bus_credentials(identity), authority.member(identity, rights))


def _environment() -> dict[str, str]:
    """What children inherit: enough for pip's own configuration, nothing that alters Python."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("HOME", "LANG", "PATH", "TMPDIR", "TZ", "USER")
        or name.startswith(("PIP_", "POTLUCK_", "SSL_", "LC_"))
        or name.lower().endswith("_proxy")
    }
    return {**kept, "PYTHONUNBUFFERED": "1"}


@contextmanager
def locked(folder: DataFolder) -> Iterator[None]:
    """One `up` a folder; the kernel frees the lock however its holder ends."""
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CommandError(
            f"the data folder cannot be used: {error}", "choose another with --data-dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CommandError(
            f"a pool is already running on {folder.root}",
            "use it, end it with `potluck down`, or choose another folder with --data-dir",
            code="already_running",
            exit_code=errors.REFUSED,
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """The gateway's door, held here so that it stays open while a gateway restarts."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(1_024)
    except OSError as error:
        listener.close()
        raise CommandError(
            f"port {port} cannot be used: {error.strerror}",
            "choose another with --port (0: any free one)",
            code="port_in_use",
        ) from error
    with listener:
        yield listener


def _write_state(folder: DataFolder, url: str, nodes: int, supervisor: Supervisor) -> None:
    own = sweep.mark(os.getpid())
    assert own is not None
    children = {name: sweep.mark(pid) for name, pid in supervisor.pids().items()}
    state = sweep.StateFile(
        url=url,
        nodes=nodes,
        supervisor=own,
        children={name: marked for name, marked in children.items() if marked is not None},
        restarts=supervisor.restarts(),
    )
    if folder.run.exists():
        keys.write_private(folder.state, msgspec.json.encode(state))


def _reason(answer: httpx.Response) -> str:
    found = msgspec.json.decode(answer.content)
    return str(found.get("error", {}).get("message", "starting"))


def _child_failed(folder: DataFolder, name: str) -> CommandError:
    log = folder.logs / f"{name}.log"
    return CommandError(f"{name} cannot stay up; the end of its log:\n{_tail(log)}", f"read {log}")


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    return "(there is none)"


def stop_signals() -> asyncio.Event:
    """Set by SIGINT, SIGTERM or SIGHUP. To be heard before the first child starts: none is lost."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def hold(
    pool: Pool, stopping: asyncio.Event, watcher: Watcher, when_ready: Callable[[], None]
) -> None:
    """Keeps the pool until `stopping`."""
    loop = asyncio.get_running_loop()
    ready = loop.create_task(pool.until_ready(watcher))
    stop = loop.create_task(stopping.wait())
    await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()
        when_ready()
        await stop
    for task in (ready, stop):
        task.cancel()
