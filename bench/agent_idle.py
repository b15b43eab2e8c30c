"""What an idle agent costs its owner: CPU of one core, and resident memory.

One run starts nats-server, a coordinator that only says welcome, and the real agent, which beats
its heart and reconciles; nothing is served. Budget: below 1 % of a core and 100 MB.

    python bench/agent_idle.py [--seconds 60] [--json out.json] [--check]
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

POOL, COORDINATOR, NAME = "bench", "co_bench", "idle"
CPU_PERCENT_MAX, RESIDENT_MB_MAX = 1.0, 100.0
WARM_UP_S = 3.0


async def agent(folder: Path, url: str) -> None:
    """The child: the agent as the composition root builds it."""
    from potluck.adapters import keys
    from potluck.adapters.accelerators import NoAccelerators
    from potluck.adapters.clock import SystemClock
    from potluck.adapters.ids import UlidIds
    from potluck.adapters.models import LocalModels
    from potluck.adapters.nats.bus import NatsBus
    from potluck.adapters.processes import LocalProcesses
    from potluck.agent.agent import Agent
    from potluck.agent.runtimes.llama_cpp import LlamaCpp
    from potluck.agent.sandboxes import tier
    from potluck.core.ids import AccountId, node_id

    signer = keys.load_or_create(folder / "node.key")
    node = node_id(signer.public_key)
    processes, clock = LocalProcesses(), SystemClock()
    one = Agent(
        pool=POOL, name=NAME, account=AccountId("acc_1"), signer=signer,
        bus=await NatsBus.connect(url, folder / "node.creds", node), clock=clock, ids=UlidIds(),
        runtime=LlamaCpp(processes=processes, clock=clock, node=node, data=folder),
        models=LocalModels(folder), accelerators=NoAccelerators(), data=folder, threads=1,
        tier=tier.probe(processes),
    )  # fmt: skip
    await one.start()
    await asyncio.Event().wait()


async def welcome(folder: Path, url: str, heard: dict[str, int]) -> None:
    from potluck.adapters.nats.bus import NatsBus
    from potluck.core.ids import BootId
    from potluck.messages import envelope, subjects
    from potluck.messages.membership import Welcome

    bus = await NatsBus.connect(url, folder / "co.creds", COORDINATOR)
    stamp = envelope.Stamp(BootId("0" * 26))

    def hello(delivery) -> None:
        heard["hellos"] += 1
        bus.publish(delivery.reply, stamp.seal(envelope.encode(Welcome())))

    def beat(_delivery) -> None:
        heard["beats"] += 1

    await bus.subscribe(subjects.received_by(POOL, "_", "hello"), hello)
    await bus.subscribe(subjects.received_by(POOL, "_", "heartbeat"), beat)


def prepare(folder: Path) -> tuple["subprocess.Popen[bytes]", str]:
    from potluck.adapters import keys
    from potluck.adapters.nats import server
    from potluck.adapters.nats.credentials import Authority, coordinator_rights, node_rights
    from potluck.core.ids import node_id

    node = node_id(keys.load_or_create(folder / "node.key").public_key)
    authority = Authority(folder / "authority")
    (folder / "node.creds").write_bytes(authority.member(node, node_rights(POOL, node)))
    rights = coordinator_rights(POOL, COORDINATOR)
    (folder / "co.creds").write_bytes(authority.member(COORDINATOR, rights))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server.write_config(folder / "nats.conf", port=port, authority=authority)
    child = subprocess.Popen(
        server.argv(folder / "nats.conf"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return child, f"nats://127.0.0.1:{port}"


async def measure(seconds: float) -> dict[str, float]:
    heard = {"hellos": 0, "beats": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nats, url = prepare(folder)
        child = None
        try:
            await welcome(folder, url, heard)
            child = subprocess.Popen([sys.executable, __file__, "--agent", name, url])
            while not heard["hellos"]:
                assert child.poll() is None, "the agent ended"
                await asyncio.sleep(0.05)
            await asyncio.sleep(WARM_UP_S)
            process = psutil.Process(child.pid)
            before, started, beats = process.cpu_times(), time.monotonic(), heard["beats"]
            await asyncio.sleep(seconds)
            after, passed = process.cpu_times(), time.monotonic() - started
            spent = after.user + after.system - before.user - before.system
            return {
                "cpu_percent": round(100 * spent / passed, 3),
                "resident_mb": round(process.memory_info().rss / 1e6, 1),
                "seconds": round(passed, 1),
                "heartbeats": heard["beats"] - beats,
            }
        finally:
            for one in (child, nats):
                if one is not None:
                    one.kill()
                    one.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="fail beyond the budget")
    parser.add_argument("--agent", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agent:
        asyncio.run(agent(Path(given.agent[0]), given.agent[1]))
        return
    found = asyncio.run(measure(given.seconds))
    print(json.dumps(found))
    if given.json:
        given.json.write_text(json.dumps(found))
    over = found["cpu_percent"] >= CPU_PERCENT_MAX or found["resident_mb"] >= RESIDENT_MB_MAX
    if given.check and (over or not found["heartbeats"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
