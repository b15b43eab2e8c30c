"""What survives: the disk, the coordinator's silence, bad models, a full disk."""

import asyncio
import errno
import hashlib
from pathlib import Path

import pytest

from potluck.agent.journal import Journal
from potluck.messages import serving as s
from potluck.messages.membership import Rehello
from potluck.messages.money import ReceiptsAck
from potluck.ports.models import ModelError
from potluck.simulator import engine
from tests.cluster.node_under_test import MESSAGES, MODEL, House, run


def test_receipts_are_repeated_until_acknowledged(tmp_path: Path) -> None:
    async def silent(house: House) -> None:
        await house.serve()
        house.coordinator.acknowledging = False
        house.gateway.ask(house.gateway.infer())
        await house.until(lambda: house.coordinator.batches >= 1)
        started = asyncio.get_running_loop().time()
        await house.until(lambda: house.coordinator.batches >= 5)
        # After 1, 2, 4 and 8 seconds.
        assert 14 < asyncio.get_running_loop().time() - started < 17
        house.coordinator.acknowledging = True
        await house.until(lambda: len(house.agent.receipts) == 0)
        batches = house.coordinator.batches
        await asyncio.sleep(120)
        assert house.coordinator.batches == batches

    run(silent, tmp_path)


def test_a_killed_node_bills_what_its_journal_holds(tmp_path: Path) -> None:
    async def killed(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(1_000)))
        await house.until(lambda: house.gateway.tokens() >= 10)
        await asyncio.sleep(0.0001)
        house.gateway.acknowledging = False
        shown = house.gateway.tokens()
        await house.restart()
        await house.until(lambda: "rcp_1_1" in house.coordinator.receipts)
        receipt = house.coordinator.receipts["rcp_1_1"]
        assert (receipt.outcome, receipt.completion_tokens) == ("abandoned", shown)
        text = b"".join(engine.token(MESSAGES, at)[1] for at in range(shown))
        assert receipt.output_digest == hashlib.sha256(text).hexdigest()
        assert receipt.prompt_tokens == engine.prompt_tokens(MESSAGES)
        # The order, said once more, does not start again.
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(1_000)))
        await asyncio.sleep(2)
        assert house.runtime.engines[-1].generated == 0
        assert house.gateway.of(s.Failed)[-1].code == "cancelled"

    run(killed, tmp_path)


def test_final_receipts_survive_a_kill_and_go_once_acknowledged(tmp_path: Path) -> None:
    async def killed(house: House) -> None:
        await house.serve()
        house.coordinator.acknowledging = False
        house.gateway.ask(house.gateway.infer())
        await house.until(lambda: house.coordinator.batches >= 1)
        before = house.coordinator.receipts.pop("rcp_1_1")
        house.coordinator.acknowledging = True
        await house.restart()
        await house.until(lambda: "rcp_1_1" in house.coordinator.receipts)
        assert house.coordinator.receipts["rcp_1_1"] == before
        await house.until(lambda: len(house.agent.receipts) == 0)
        house.coordinator.receipts.clear()
        await house.restart()
        await asyncio.sleep(60)
        assert house.coordinator.receipts == {}

    run(killed, tmp_path)


def test_a_refused_receipt_is_kept_aside(tmp_path: Path) -> None:
    async def refused(house: House) -> None:
        await house.serve()
        house.coordinator.acknowledging = False
        house.gateway.ask(house.gateway.infer())
        await house.until(lambda: house.coordinator.batches >= 1)
        house.coordinator.say("receipts_ack", ReceiptsAck([], [("rcp_1_1", "hold_voided")]))
        await house.until(lambda: len(house.agent.receipts) == 0)
        assert "hold_voided" in (tmp_path / "refused_receipts.jsonl").read_text()

    run(refused, tmp_path)


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_journal_loses_its_last_record_only(tmp_path: Path, cut: int) -> None:
    async def begun(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(1_000)))
        await house.until(lambda: house.gateway.tokens() >= 10)

    run(begun, tmp_path)
    path = tmp_path / "journal"
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    journal = Journal(path)
    assert list(journal.unfinished) == ["rcp_1_1"]
    assert 1 <= journal.unfinished["rcp_1_1"].tokens <= 10
    journal.close()


def test_a_full_disk_refuses_new_work_and_keeps_old_receipts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real = os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        real(file, data[:3], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    async def disk(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(50)))
        await house.until(lambda: house.gateway.tokens() >= 5)
        monkeypatch.setattr("os.pwrite", full)
        house.gateway.ask(house.gateway.infer("req_2"))
        await house.until(lambda: len(house.gateway.of(s.Failed, "req_2")) > 0)
        assert house.gateway.of(s.Failed, "req_2")[0].code == "store_full"
        await house.until(lambda: "rcp_1_1" in house.coordinator.receipts)
        assert house.coordinator.receipts["rcp_1_1"].completion_tokens == 50
        monkeypatch.setattr("os.pwrite", real)
        house.gateway.ask(house.gateway.infer("req_3"))
        await house.until(lambda: "rcp_3_1" in house.coordinator.receipts)

    run(disk, tmp_path)


def test_hello_until_welcomed_and_again_when_asked(tmp_path: Path) -> None:
    async def hello(house: House) -> None:
        house.coordinator.welcoming = False
        await house.until(lambda: len(house.coordinator.hellos) >= 3)
        house.coordinator.welcoming = True
        await house.until(lambda: house.agent.presence.refusal == "")
        said = len(house.coordinator.hellos)
        await asyncio.sleep(60)
        assert len(house.coordinator.hellos) == said
        # One each five seconds, whatever else happens.
        assert len(house.coordinator.beats) >= 12
        house.coordinator.say("rehello", Rehello())
        await house.until(lambda: len(house.coordinator.hellos) == said + 1)
        hello = house.coordinator.hellos[-1]
        assert hello.tier == "full"
        assert hello.inventory.cpu_cores >= 1
        assert hello.inventory.accelerators == []

    run(hello, tmp_path)


def test_a_wrong_model_fails_for_good_and_is_tried_again_on_a_new_order(tmp_path: Path) -> None:
    async def wrong(house: House) -> None:
        house.models.errors = [ModelError("expected SHA-256 aa, found bb", permanent=True)]
        house.coordinator.deploy()
        await asyncio.sleep(300)
        report = house.coordinator.beats[-1].replicas[0]
        assert (report.state, report.detail) == ("failed", "expected SHA-256 aa, found bb")
        house.coordinator.deploy()
        await house.until(lambda: house.agent.deployments.ready(MODEL) is not None)

    run(wrong, tmp_path)


def test_passing_failures_are_tried_again_more_and_more_slowly(tmp_path: Path) -> None:
    async def failing(house: House) -> None:
        house.models.errors = [ModelError("no network", permanent=False)] * 2
        house.coordinator.deploy()
        await house.until(lambda: house.agent.deployments.ready(MODEL) is not None)
        assert house.runtime.failures == 0
        assert len(house.runtime.engines) == 1

    run(failing, tmp_path, failures=2)


def test_other_numbers_mean_another_engine_and_no_order_means_none(tmp_path: Path) -> None:
    async def changed(house: House) -> None:
        await house.serve(slots=2)
        house.coordinator.deploy(slots=3)
        await house.until(lambda: len(house.runtime.engines) == 2)
        assert not house.runtime.engines[0].alive
        assert house.runtime.engines[1].spec.slots == 3
        await house.until(lambda: house.agent.deployments.ready(MODEL) is not None)
        house.coordinator.deploy(wanted=False)
        await house.until(lambda: house.agent.deployments.reports() == [])
        assert not house.runtime.engines[1].alive

    run(changed, tmp_path)


def test_an_unload_lets_requests_end(tmp_path: Path) -> None:
    async def unload(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(200)))
        await house.until(lambda: house.gateway.tokens() > 5)
        house.coordinator.deploy(wanted=False)
        await house.until(lambda: "rcp_1_1" in house.coordinator.receipts)
        assert house.coordinator.receipts["rcp_1_1"].completion_tokens == 200
        await house.until(lambda: house.agent.deployments.reports() == [])

    run(unload, tmp_path)


def test_stop_bills_what_was_handed_on_and_stops_the_engines(tmp_path: Path) -> None:
    async def stop(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(1_000)))
        await house.until(lambda: house.gateway.tokens() > 5)
        await house.agent.stop()
        assert house.gateway.of(s.Failed)[-1].code == "shutting_down"
        receipt = house.coordinator.receipts["rcp_1_1"]
        assert receipt.completion_tokens == house.gateway.tokens()
        assert not house.runtime.engines[0].alive
        house.agent = house.new_agent()
        await house.agent.start()

    run(stop, tmp_path)
