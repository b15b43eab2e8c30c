"""What the gateway costs beside nginx: CPU a request, CPU a streamed chunk, added latency.

One run starts the real thing: nats-server, coordinator, agent and gateway, a fake engine behind
both paths, and nginx as the peer. Gateway and nginx are pinned to core 0, all else to core 1.

    python bench/gateway.py [--seconds 5] [--json out.json] [--check] [--pure]

Measures the package as its wheel has it, the token path compiled (ADR 0011); `--pure`: as it stands
in the sources. Needs `make`, `cc`, Python.h and `nginx`. Ratios in one run matter; absolute figures
depend on the machine. "chunk" is one chunk of the engine (the load generator's `@ns@` marks);
frames a chunk are printed beside it.
Added latency is the whole way: gateway, bus, agent and back, with its journal on a disk.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
BUILD = HERE / "build"
SITE = BUILD / "site"
POOL, COORDINATOR = "bench", "co_bench"
KEY = "pk_" + "B" * 43
MODEL = "fake"
PINNED, REST = 0, 1
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
LIMITS = {"request": 5.0, "request_even": 5.0, "latency": 3.5, "paced": 0.8, "saturated": 1.5}


# Processes of the pool; each is this file again, with a role.


def gateway_identity() -> Any:
    from potluck.adapters.keys import Ed25519Signer
    from potluck.core.ids import gateway_id

    signer = Ed25519Signer(b"G" * 32)
    return signer, gateway_id(signer.public_key)


def node_identity() -> Any:
    from potluck.adapters.keys import Ed25519Signer
    from potluck.core.ids import node_id

    signer = Ed25519Signer(b"N" * 32)
    return signer, node_id(signer.public_key)


async def run_gateway(folder: Path, url: str, port: int, stop: asyncio.Event) -> None:
    from potluck.adapters.clock import SystemClock
    from potluck.adapters.ids import UlidIds
    from potluck.adapters.nats.bus import NatsBus
    from potluck.gateway.http import server
    from potluck.gateway.serving.serving import Serving

    signer, me = gateway_identity()
    bus = await NatsBus.connect(url, folder / f"{me}.creds", me)
    serving = Serving(pool=POOL, signer=signer, bus=bus, clock=SystemClock(), ids=UlidIds())
    await serving.start()
    await server.serve(serving, [server.listen("127.0.0.1", port)], stop, grace_ms=100)
    await bus.drain()


async def run_coordinator(folder: Path, url: str, _port: int, stop: asyncio.Event) -> None:
    from potluck.adapters.clock import SystemClock
    from potluck.adapters.ids import UlidIds
    from potluck.adapters.keys import Ed25519Verifier
    from potluck.adapters.nats.bus import NatsBus
    from potluck.adapters.sql.writer import open_store
    from potluck.coordinator import bootstrap
    from potluck.coordinator.coordinator import Coordinator

    clock, ids = SystemClock(), UlidIds()
    store = await open_store(folder / "pool.db")
    await store.transact(lambda tx: bootstrap.ensure(tx, founding(folder), clock.wall_ms(), ids))
    bus = await NatsBus.connect(
        url, folder / f"{COORDINATOR}.creds", COORDINATOR,
        observer_credentials=folder / "observer.creds",
    )  # fmt: skip
    coordinator = Coordinator(
        pool=POOL, id=COORDINATOR, store=store, bus=bus, clock=clock, ids=ids,  # type: ignore[arg-type]
        verifier=Ed25519Verifier(),
    )  # fmt: skip
    await coordinator.start()
    await stop.wait()
    await coordinator.stop()
    await bus.drain()
    await store.close()


async def run_agent(folder: Path, url: str, _port: int, stop: asyncio.Event) -> None:
    from potluck.adapters.accelerators import NoAccelerators
    from potluck.adapters.clock import SystemClock
    from potluck.adapters.ids import UlidIds
    from potluck.adapters.models import LocalModels
    from potluck.adapters.nats.bus import NatsBus
    from potluck.agent.agent import Agent
    from potluck.agent.runtimes.attached import Attached
    from potluck.core.ids import AccountId, Digest

    signer, me = node_identity()
    bus = await NatsBus.connect(url, folder / f"{me}.creds", me)
    agent = Agent(
        pool=POOL, name="bench", account=AccountId("acc_provider"), signer=signer, bus=bus,
        clock=SystemClock(), ids=UlidIds(),
        runtime=Attached(folder / "engine.sock", Digest("e" * 64)), models=LocalModels(folder),
        accelerators=NoAccelerators(), data=folder / "node", threads=1, tier=("none", "bench"),
    )  # fmt: skip
    await agent.start()
    await stop.wait()
    await agent.stop()
    await bus.drain()


def founding(folder: Path) -> Any:
    from potluck.coordinator import bootstrap
    from potluck.core import parameters
    from potluck.core.ids import AccountId, Digest, KeyId
    from potluck.core.pricing import Price
    from potluck.messages.membership import Manifest, Source

    content = (folder / "model.gguf").read_bytes()
    return bootstrap.Founding(
        owner=AccountId("acc_owner"), provider=AccountId("acc_provider"), key=KeyId("key_bench"),
        key_hash=hashlib.sha256(KEY.encode()).hexdigest(),
        manifest=Manifest(
            name=MODEL, digest=Digest(hashlib.sha256(content).hexdigest()),
            size_bytes=len(content), format="gguf",
            sources=(Source(kind="path", location=str(folder / "model.gguf")),),
            context_tokens=65_536, memory_bytes=1, redundancy_class="bench", licence="none",
        ),
        slots=512,
        price=Price(
            input_micro_per_mtok=parameters.price_input_micro_per_mtok,
            output_micro_per_mtok=parameters.price_output_micro_per_mtok,
            fee_basis_points=parameters.fee_basis_points,
        ),
        starting_credit_micro=10**15,
    )  # fmt: skip


ROLES = {"gateway": run_gateway, "coordinator": run_coordinator, "agent": run_agent}


def role(name: str, folder: str, url: str, port: str) -> None:
    import gc

    import uvloop

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        gc.collect()
        gc.freeze()
        await ROLES[name](Path(folder), url, int(port), stop)

    uvloop.run(main())


# The stage


@dataclass(frozen=True)
class Stage:
    pids: dict[str, int]
    ports: dict[str, int]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def build(pure: bool) -> None:
    BUILD.mkdir(exist_ok=True)
    if not pure:
        build_package()
    for name in ("engine", "loadgen"):
        source, binary = HERE / "peers" / f"{name}.c", BUILD / name
        if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["cc", "-O2", "-w", "-o", binary, source], check=True)


def build_package() -> None:
    """The wheel, unpacked beside the sources; anew when one of them is newer."""
    newest = max(path.stat().st_mtime for path in [ROOT / "setup.py", *ROOT.glob("src/**/*.py")])
    if SITE.exists() and SITE.stat().st_mtime > newest:
        return
    shutil.rmtree(SITE, ignore_errors=True)
    print("compiling the token path; about a minute", file=sys.stderr)
    subprocess.run(["make", "--silent", "wheel"], cwd=ROOT, check=True)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(SITE)


def nginx_config(folder: Path, port: int, upstream: int) -> Path:
    path = folder / "nginx.conf"
    path.write_text(
        f"""
daemon off; worker_processes 1; worker_cpu_affinity {1 << PINNED:02b}; pid {folder}/nginx.pid;
error_log {folder}/nginx.err; events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 10000000; client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 256; keepalive_requests 10000000; }}
  server {{ listen 127.0.0.1:{port} backlog=1024;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""
    )
    return path


@contextlib.contextmanager
def stage(pure: bool = False) -> Iterator[Stage]:
    from potluck.adapters.nats import credentials, server

    build(pure)
    environment = {**os.environ} if pure else {**os.environ, "PYTHONPATH": str(SITE)}
    with contextlib.ExitStack() as stack:
        # A short path: a unix socket's name has at most 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gwb")))
        if os.getuid() == 0:
            folder.chmod(0o755)
        (folder / "model.gguf").write_bytes(b"GGUF no model")
        ports = {name: free_port() for name in ("engine", "nginx", "gateway", "nats")}
        authority = credentials.Authority(folder / "keys")
        mint_all(authority, folder, credentials)
        server.write_config(folder / "nats.json", port=ports["nats"], authority=authority)
        url = f"nats://127.0.0.1:{ports['nats']}"
        pids: dict[str, int] = {}

        def start(name: str, core: int, argv: list[str]) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                argv, stdout=log, stderr=log, env=environment,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )  # fmt: skip
            stack.callback(end, process, name, folder)
            pids[name] = process.pid

        engine = [str(BUILD / "engine"), str(ports["engine"]), str(folder / "engine.sock")]
        start("engine", REST, engine)
        nginx = shutil.which("nginx") or "/usr/sbin/nginx"
        conf = nginx_config(folder, ports["nginx"], ports["engine"])
        start("nginx_master", PINNED, [nginx, "-p", str(folder), "-c", str(conf)])
        start("nats", REST, server.argv(folder / "nats.json"))
        for name in ROLES:
            argv = [sys.executable, __file__, "--role", name, str(folder), url]
            core = PINNED if name == "gateway" else REST
            start(name, core, [*argv, str(ports["gateway"])])
        wait_ready(ports["gateway"])
        pids["nginx"] = child_of(pids["nginx_master"])
        yield Stage(pids, ports)


def mint_all(authority: Any, folder: Path, credentials: Any) -> None:
    for me, rights_of in (
        (gateway_identity()[1], credentials.gateway_rights),
        (node_identity()[1], credentials.node_rights),
    ):
        made = authority.member(me, rights_of(POOL, me))
        (folder / f"{me}.creds").write_bytes(made)
    rights = credentials.coordinator_rights(POOL, COORDINATOR)
    (folder / f"{COORDINATOR}.creds").write_bytes(authority.member(COORDINATOR, rights))
    (folder / "observer.creds").write_bytes(authority.observer(COORDINATOR))


def end(process: "subprocess.Popen[bytes]", name: str, folder: Path) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log = (folder / f"{name}.log").read_text(errors="replace")
    if log.strip() and name in ROLES:
        print(f"--- {name}\n{log[-3000:]}", file=sys.stderr)


def wait_ready(port: int) -> None:
    ends = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=3).read()
            return
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])


# Measuring


def cpu_s(pid: int) -> float:
    """User and system time of a whole process (proc(5), stat fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def load(
    stage: Stage, path: str, seconds: float, *, conc: int, stream: int, chunks: int, gap_us: int
) -> dict[str, Any]:
    """One run of the load generator; CPU of each process while it ran, in seconds."""
    argv = [
        str(BUILD / "loadgen"), str(stage.ports[path]), str(conc), str(seconds), str(stream),
        str(chunks), str(gap_us), "--key", KEY,
    ]  # fmt: skip
    before = {name: cpu_s(pid) for name, pid in stage.pids.items()}
    done = subprocess.run(
        argv, capture_output=True, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {REST}),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    found["cpu"] = {name: cpu_s(pid) - before[name] for name, pid in stage.pids.items()}
    found["stderr"] = done.stderr[:300]
    if found["errs"]:
        print(f"errors on {path}: {found['errs']} {done.stderr[:300]}", file=sys.stderr)
    return found


LOADS: dict[str, dict[str, int]] = {
    "request": {"conc": 32, "stream": 0, "chunks": 12, "gap_us": 0},
    # The same load for both: an engine that takes 18 ms, as real ones do, and not the agent,
    # decides how often each is woken.
    "request_even": {"conc": 32, "stream": 0, "chunks": 12, "gap_us": 1_500},
    "latency": {"conc": 1, "stream": 0, "chunks": 12, "gap_us": 0},
    "paced": {"conc": 100, "stream": 1, "chunks": 200, "gap_us": 10_000},
    "saturated": {"conc": 16, "stream": 1, "chunks": 400, "gap_us": 0},
}


def measure(stage: Stage, seconds: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    load(stage, "gateway", 1, **LOADS["request"])  # Warm: the key, a hold, code paths.
    for name, shape in LOADS.items():
        found = {
            path: load(stage, path, seconds, **shape) for path in ("nginx", "gateway", "engine")
        }
        out[name] = found
    return out


def table(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for name, chunks in (("request", 1), ("request_even", 1), ("paced", 199), ("saturated", 399)):
        runs = found[name]
        costs = {
            path: runs[path]["cpu"][path] / max(1, runs[path]["done"]) / chunks * 1e6
            for path in ("nginx", "gateway")
        }
        rows[name] = {
            "nginx_us": costs["nginx"], "gateway_us": costs["gateway"],
            "ratio": costs["gateway"] / costs["nginx"], "limit": LIMITS[name],
            "gateway_rps": runs["gateway"]["rps"], "nginx_rps": runs["nginx"]["rps"],
            "gateway_frames_per_chunk":
                runs["gateway"]["events"] / max(1, runs["gateway"]["done"]) / chunks,
            "errors": runs["gateway"]["errs"] + runs["nginx"]["errs"],
        }  # fmt: skip
    runs = found["latency"]
    direct = runs["engine"]["lat_p50"]
    added = {path: runs[path]["lat_p50"] - direct for path in ("nginx", "gateway")}
    rows["latency"] = {
        "nginx_us": added["nginx"], "gateway_us": added["gateway"],
        "ratio": added["gateway"] / added["nginx"], "limit": LIMITS["latency"],
        "direct_us": direct, "errors": runs["gateway"]["errs"],
    }  # fmt: skip
    return rows


def show(rows: dict[str, dict[str, float]]) -> None:
    print(f"{'':10} {'nginx µs':>10} {'gateway µs':>11} {'ratio':>7} {'limit':>6}")
    for name, row in rows.items():
        rest = {
            key: round(value, 2)
            for key, value in row.items()
            if key not in ("nginx_us", "gateway_us", "ratio", "limit")
        }
        print(
            f"{name:10} {row['nginx_us']:10.1f} {row['gateway_us']:11.1f} {row['ratio']:7.2f}"
            f" {row['limit']:6.2f}  {rest}"
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--check", action="store_true", help="fail if a limit is missed")
    arguments.add_argument("--pure", action="store_true", help="nothing compiled")
    asked = arguments.parse_args()
    with stage(asked.pure) as made:
        found = measure(made, asked.seconds)
    rows = table(found)
    show(rows)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({"rows": rows, "runs": found}, indent=2))
    missed = [name for name, row in rows.items() if row["ratio"] > row["limit"] or row["errors"]]
    if asked.check and missed:
        sys.exit(f"limits missed: {', '.join(missed)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        role(*sys.argv[2:6])
    else:
        main()
