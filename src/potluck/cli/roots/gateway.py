"""The gateway's process: `python -m potluck.cli.roots.gateway DATA_DIR BUS_URL SOCKET_FD`."""

import asyncio
import socket
import sys
from pathlib import Path

from potluck.adapters import keys
from potluck.adapters.clock import SystemClock
from potluck.adapters.ids import UlidIds
from potluck.adapters.nats.bus import NatsBus
from potluck.cli import founding
from potluck.cli.folder import DataFolder
from potluck.cli.roots import lifetime
from potluck.core import parameters
from potluck.core.ids import gateway_id
from potluck.gateway.http import server
from potluck.gateway.serving.serving import Serving


async def serve(
    folder: DataFolder, url: str, listener: socket.socket, stopping: asyncio.Event
) -> None:
    pool = founding.read(folder)
    signer = keys.load_or_create(folder.gateway / "identity.key")
    me = gateway_id(signer.public_key)
    bus = await NatsBus.connect(url, folder.bus_credentials(me), me)
    serving = Serving(
        pool=pool.pool,
        signer=signer,
        bus=bus,
        clock=SystemClock(),
        ids=UlidIds(folder.gateway / "boot"),
    )
    await serving.start()
    await server.serve(serving, [listener], stopping, grace_ms=parameters.child_streams_grace_ms)
    await bus.drain()


if __name__ == "__main__":
    data, bus_url, descriptor = sys.argv[1:]
    door = socket.socket(fileno=int(descriptor))
    door.setblocking(False)
    lifetime.run(
        "gateway",
        lambda stopping: serve(DataFolder(Path(data)), bus_url, door, stopping),
    )
