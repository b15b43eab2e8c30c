"""One pool for all tests that do not harm it."""

from collections.abc import Iterator

import pytest

from tests.system import pools
from tests.system.pools import RunningPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    with pools.running(tmp_path_factory.mktemp("pool")) as running:
        # `up` is ready with one node; tests look at both.
        pools.until(lambda: len(serving(running)) == 2, what="both nodes")
        yield running


def serving(pool: RunningPool) -> list[str]:
    return [
        node["name"]
        for node in pool.get("/nodes")["data"]
        if any(replica["state"] == "ready" for replica in node["replicas"])
    ]
