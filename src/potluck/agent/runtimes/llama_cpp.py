"""llama.cpp's server in a sandbox: without network, its model read-only, on a unix socket.

The engine is the wheel `xllamacpp` or a `llama-server` binary; its digest is that of the binary.
"""

import asyncio
import hashlib
import importlib.util
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from potluck.agent.runtimes.attached import LlamaClient
from potluck.agent.sandboxes import bubblewrap, tier
from potluck.core import parameters
from potluck.core.ids import Digest
from potluck.core.refusals import Refusal
from potluck.ports.clock import Clock
from potluck.ports.processes import Limits, Process, Processes, SpawnError
from potluck.ports.runtime import Ask, EngineError, Finish, ModelSpec, Piece, Prefilled

_SCRIPT: Final = Path(__file__).with_name("llama_server.py")
_MODEL_INSIDE: Final = "/opt/model.gguf"
_SOCKET: Final = "engine.sock"
_SOCKET_INSIDE: Final = f"{bubblewrap.WORK}/{_SOCKET}"
_LOG_TAIL_BYTES: Final = 2_000
_READY_POLL_MS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An engine as installed here: its binary, what the sandbox must show, and how to call it."""

    binary: Path
    shown: tuple[tuple[Path, str], ...]
    argv: tuple[str, ...]
    wheel: bool
    env: dict[str, str]

    def call(self, spec: ModelSpec) -> list[str]:
        numbers = (str(spec.slots), str(spec.context_tokens), str(spec.threads))
        if self.wheel:
            return [*self.argv, _MODEL_INSIDE, _SOCKET_INSIDE, *numbers]
        return [
            *self.argv, "-m", _MODEL_INSIDE, "--host", _SOCKET_INSIDE, "-np", numbers[0],
            "-c", str(spec.context_tokens * spec.slots), "-t", numbers[2], "--no-kv-unified",
            "--jinja", "--offline",
        ]  # fmt: skip


class LlamaCppEngine:
    """One server process with one model."""

    def __init__(
        self, process: Process, client: LlamaClient, digest: Digest, sandbox_tier: str, work: Path
    ) -> None:
        self.digest = digest
        self.tier = sandbox_tier
        self.process = process
        self._client = client
        self._work = work

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def generate(self, ask: Ask) -> AsyncIterator[Piece | Prefilled | Finish]:
        return self._client.generate(ask)

    async def stop(self) -> None:
        self._client.close()
        await self.process.stop(parameters.engine_stop_grace_ms)
        shutil.rmtree(self._work, ignore_errors=True)


class LlamaCpp:
    """`ports.runtime.Runtime`."""

    def __init__(
        self, *, processes: Processes, clock: Clock, node: str, data: Path,
        server: Path | None = None,
    ) -> None:  # fmt: skip
        """`server`: a `llama-server` to use instead of the wheel; without either, the PATH's."""
        self._processes = processes
        self._clock = clock
        self._node = node
        self._run = data / "run"
        self._logs = data / "logs"
        self._server = server
        self._digest: Digest | None = None
        self._started = 0
        # Sockets and work folders of an agent that was killed.
        shutil.rmtree(self._run, ignore_errors=True)

    async def start(self, spec: ModelSpec) -> LlamaCppEngine:
        try:
            program = find(self._server)
            digest = await self._digest_of(program.binary)
            sandbox_tier, reason = tier.probe(self._processes)
            if sandbox_tier == "none":
                raise bubblewrap.SandboxError(reason)
            work, log = self._folders(spec)
            process = await self._spawn(program, spec, work, log)
        except (bubblewrap.SandboxError, SpawnError, OSError) as error:
            raise EngineError(Refusal.ENGINE_FAILED, f"no engine: {error}") from error
        client = LlamaClient(work / _SOCKET, spec.slots)
        engine = LlamaCppEngine(process, client, digest, sandbox_tier, work)
        try:
            await self._ready(engine, client, log)
        except BaseException:
            await engine.stop()
            raise
        return engine

    def _folders(self, spec: ModelSpec) -> tuple[Path, Path]:
        self._started += 1
        self._logs.mkdir(parents=True, exist_ok=True)
        work = self._run / f"{spec.digest[:12]}-{self._started}"
        work.mkdir(parents=True, mode=0o700)
        log = self._logs / f"engine-{spec.digest[:12]}.log"
        # The last engine's words only; who starts it makes the file.
        log.unlink(missing_ok=True)
        return work, log

    async def _spawn(self, program: Program, spec: ModelSpec, work: Path, log: Path) -> Process:
        memory_bytes = max(spec.memory_bytes, parameters.engine_memory_min_bytes)
        box = bubblewrap.Box(
            name=f"engine-{self._started}-{spec.digest[:12]}",
            argv=program.call(spec),
            work=work,
            shown=(*program.shown, (spec.path.resolve(), _MODEL_INSIDE)),
            env=program.env,
            limits=Limits(
                memory_bytes=memory_bytes,
                pids=parameters.sandbox_pids_max,
                cpu_cores=float(spec.threads),
                file_bytes=parameters.sandbox_file_bytes,
            ),
            log=log,
        )
        try:
            with bubblewrap.command(box, bubblewrap.unprivileged_uid(self._node)) as command:
                return await self._processes.spawn(command)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise

    async def _ready(self, engine: LlamaCppEngine, client: LlamaClient, log: Path) -> None:
        deadline_ms = self._clock.now_ms() + parameters.engine_start_timeout_ms
        while not await client.healthy():
            if not engine.alive:
                raise EngineError(
                    Refusal.ENGINE_FAILED,
                    f"the engine ended with {engine.process.returncode}: {_tail(log)}",
                )
            if self._clock.now_ms() > deadline_ms:
                raise EngineError(Refusal.ENGINE_FAILED, f"the engine is not ready: {_tail(log)}")
            await self._clock.sleep_ms(_READY_POLL_MS)

    async def _digest_of(self, binary: Path) -> Digest:
        if self._digest is None:
            self._digest = await asyncio.to_thread(_sha256, binary)
        return self._digest


def find(server: Path | None = None) -> Program:
    """Raises `bubblewrap.SandboxError` where no engine is installed."""
    spec = importlib.util.find_spec("xllamacpp")
    if server is None and spec is not None and spec.origin is not None:
        return _wheel(Path(spec.origin).parent)
    on_path = server or shutil.which("llama-server")
    if on_path is None:
        raise bubblewrap.SandboxError("neither xllamacpp nor a llama-server is installed")
    binary = Path(on_path).resolve()
    if binary.is_relative_to("/usr"):
        return Program(binary=binary, shown=(), argv=(str(binary),), wheel=False, env={})
    return Program(
        binary=binary,
        shown=((binary.parent, "/opt/llama"),),
        argv=(f"/opt/llama/{binary.name}",),
        wheel=False,
        env={"LD_LIBRARY_PATH": "/opt/llama"},
    )


def _wheel(package: Path) -> Program:
    """xllamacpp, run by this process's own interpreter, whose home may be closed to others."""
    python, prefix = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    shown = [(package, "/opt/engine/xllamacpp"), (_SCRIPT, "/opt/llama_server.py")]
    libraries = package.with_name("xllamacpp.libs")
    if libraries.is_dir():
        shown.append((libraries, "/opt/engine/xllamacpp.libs"))
    env = {}
    inside = str(python)
    if not python.is_relative_to("/usr"):
        if not python.is_relative_to(prefix):
            raise bubblewrap.SandboxError(f"the interpreter {python} is not inside {prefix}")
        shown.append((prefix, "/opt/python"))
        inside = f"/opt/python/{python.relative_to(prefix)}"
        env["LD_LIBRARY_PATH"] = "/opt/python/lib"
    binary = next(path for path in sorted(package.iterdir()) if path.name.endswith(".so"))
    argv = (inside, "-I", "-S", "-B", "/opt/llama_server.py", "/opt/engine")
    return Program(binary=binary, shown=tuple(shown), argv=argv, wheel=True, env=env)


def _sha256(path: Path) -> Digest:
    with path.open("rb") as file:
        return Digest(hashlib.file_digest(file, "sha256").hexdigest())


def _tail(log: Path) -> str:
    try:
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        return "no log"
