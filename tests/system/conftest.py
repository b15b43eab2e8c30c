"""One pool for all tests that do not harm it."""

from collections.abc import Iterator

import pytest

from tests.system import pools
from tests.system.pools import RunningPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    with pools.running(tmp_path_factory.mktemp("pool")) as running:
        yield running
