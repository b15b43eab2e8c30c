"""A node's process: `python -m potluck.cli.roots.agent DATA_DIR BUS_URL NAME THREADS`."""

import asyncio
import sys
from pathlib import Path

from potluck.adapters import accelerators, keys
from potluck.adapters.clock import SystemClock
from potluck.adapters.ids import UlidIds
from potluck.adapters.models import LocalModels
from potluck.adapters.nats.bus import NatsBus
from potluck.adapters.processes import LocalProcesses
from potluck.agent.agent import Agent
from potluck.agent.runtimes.llama_cpp import LlamaCpp
from potluck.agent.sandboxes import tier
from potluck.cli import founding
from potluck.cli.folder import DataFolder
from potluck.cli.roots import lifetime
from potluck.core.ids import node_id


async def serve(
    folder: DataFolder, url: str, name: str, threads: int, stopping: asyncio.Event
) -> None:
    pool = founding.read(folder)
    data = folder.node(name)
    signer = keys.load_or_create(data / "identity.key")
    me = node_id(signer.public_key)
    clock = SystemClock()
    processes = LocalProcesses()
    bus = await NatsBus.connect(url, folder.bus_credentials(me), me)
    agent = Agent(
        pool=pool.pool,
        name=name,
        account=pool.provider,
        signer=signer,
        bus=bus,
        clock=clock,
        ids=UlidIds(data / "boot"),
        runtime=LlamaCpp(processes=processes, clock=clock, node=name, data=data),
        models=LocalModels(data),
        accelerators=accelerators.NoAccelerators(),
        data=data,
        threads=threads,
        tier=await tier.prove(processes, name),
    )
    await agent.start()
    await stopping.wait()
    await agent.stop()
    await bus.drain()


if __name__ == "__main__":
    data_dir, bus_url, node_name, thread_count = sys.argv[1:]
    lifetime.run(
        node_name,
        lambda stopping: serve(
            DataFolder(Path(data_dir)), bus_url, node_name, int(thread_count), stopping
        ),
    )
