"""The coordinator's process: `python -m potluck.cli.roots.coordinator DATA_DIR BUS_URL`."""

import asyncio
import sys
from pathlib import Path

from potluck.adapters.clock import SystemClock
from potluck.adapters.ids import UlidIds
from potluck.adapters.keys import Ed25519Verifier
from potluck.adapters.nats.bus import NatsBus
from potluck.adapters.sql.writer import open_store
from potluck.cli import founding
from potluck.cli.folder import DataFolder
from potluck.cli.roots import lifetime
from potluck.coordinator import bootstrap
from potluck.coordinator.coordinator import Coordinator
from potluck.core import parameters
from potluck.core.pricing import Price

BUILTIN_PRICE = Price(
    input_micro_per_mtok=parameters.price_input_micro_per_mtok,
    output_micro_per_mtok=parameters.price_output_micro_per_mtok,
    fee_basis_points=parameters.fee_basis_points,
)


def _founding(pool: founding.PoolFile) -> bootstrap.Founding:
    return bootstrap.Founding(
        owner=pool.owner,
        provider=pool.provider,
        key=pool.key,
        key_hash=pool.key_hash,
        manifest=pool.manifest,
        slots=pool.slots,
        price=BUILTIN_PRICE,
    )


async def serve(folder: DataFolder, url: str, stopping: asyncio.Event) -> None:
    pool = founding.read(folder)
    clock, ids = SystemClock(), UlidIds(folder.root / "coordinator.boot")
    loop = asyncio.get_running_loop()

    def on_broken() -> None:
        """Without its database it is of no use: it ends, and is started again."""
        loop.call_soon_threadsafe(stopping.set)

    store = await open_store(folder.database, on_broken)
    try:
        await store.transact(lambda tx: bootstrap.ensure(tx, _founding(pool), clock.wall_ms(), ids))
        bus = await NatsBus.connect(
            url,
            folder.bus_credentials(pool.coordinator),
            pool.coordinator,
            observer_credentials=folder.observer_credentials,
        )
        coordinator = Coordinator(
            pool=pool.pool,
            id=pool.coordinator,
            store=store,
            bus=bus,
            clock=clock,
            ids=ids,
            verifier=Ed25519Verifier(),
        )
        await coordinator.start()
        await stopping.wait()
        await coordinator.stop()
        await bus.drain()
    finally:
        await store.close()


if __name__ == "__main__":
    data, bus_url = sys.argv[1:]
    lifetime.run(
        "coordinator",
        lambda stopping: serve(DataFolder(Path(data)), bus_url, stopping),
    )
