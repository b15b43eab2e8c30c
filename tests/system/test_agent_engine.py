"""The whole agent with the real engine: only the bus is in memory."""

import asyncio
import hashlib
import os
import signal
from pathlib import Path

import pytest

from potluck.adapters.clock import SystemClock
from potluck.adapters.models import LocalModels
from potluck.adapters.processes import LocalProcesses
from potluck.agent.runtimes.llama_cpp import LlamaCpp
from potluck.core.ids import Digest
from potluck.messages import serving as s
from potluck.messages.membership import Deploy, Deployment, Manifest, Source
from tests.cluster.node_under_test import House
from tests.contract.test_runtime import MODEL, _missing

pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "complete")


def manifest() -> Manifest:
    digest = Digest(hashlib.sha256(MODEL.read_bytes()).hexdigest())
    return Manifest(
        "tiny", digest, MODEL.stat().st_size, "gguf", (Source("path", str(MODEL)),), 256,
        512 << 20, "llama.cpp/q8_0", "CC0-1.0",
    )  # fmt: skip


def test_real_tokens_are_served_billed_and_the_engine_is_restarted(tmp_path: Path) -> None:
    async def body() -> None:
        house = House(tmp_path)
        house.runtime = LlamaCpp(
            processes=LocalProcesses(), clock=SystemClock(), node="n", data=tmp_path
        )
        house.models = LocalModels(tmp_path)
        house.agent.kill()
        house.agent = house.new_agent()
        await house.open()
        one = manifest()
        house.coordinator.say("deploy", Deploy(1, [Deployment(one, 2)]))
        await house.until(lambda: house.agent.deployments.ready(one.digest) is not None, 60)
        infer = house.gateway.infer(
            model=one.digest, sampling=s.Sampling(40, temperature=0.0, seed=1)
        )
        house.gateway.ask(infer)
        await house.until(lambda: "rcp_1_1" in house.coordinator.receipts, 30)
        receipt = house.coordinator.receipts["rcp_1_1"]
        assert receipt.completion_tokens == house.gateway.tokens() > 0
        assert receipt.outcome in ("stop", "length")
        assert receipt.prompt_tokens > 0
        assert (receipt.tier, len(receipt.engine)) != ("none", 0)
        replica = house.agent.deployments.ready(one.digest)
        assert replica is not None
        os.kill(replica.engine.process.pid, signal.SIGKILL)
        await house.until(lambda: house.agent.deployments.ready(one.digest) is None, 30)
        await house.until(lambda: house.agent.deployments.ready(one.digest) is not None, 30)
        infer = house.gateway.infer("req_2", model=one.digest)
        house.gateway.ask(infer)
        await house.until(lambda: "rcp_2_1" in house.coordinator.receipts, 30)
        await house.agent.stop()

    asyncio.run(body())
