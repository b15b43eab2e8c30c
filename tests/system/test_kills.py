"""`kill -9` of each child in turn while twenty streams run: all comes back, nothing is lost."""

import contextlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.system import pools
from tests.system.pools import RunningPool

STREAMS = 20
VICTIMS = ("nats", "coordinator", "gateway", "node-1", "node-2")
RIGHT_ENDS = {"stop", "length"}


@dataclass
class Story:
    """How one stream ended, as its client saw it."""

    text: str = ""
    tokens: int = 0
    """Shown, counted by their logprobs."""
    usage: dict | None = None
    finish: str | None = None
    error: str | None = None
    receipt: str = ""
    done: bool = False
    broke: bool = False
    status: int = 0

    @property
    def ended_well(self) -> bool:
        return self.finish in RIGHT_ENDS and self.done


def tell(pool: RunningPool, index: int, story: Story) -> None:
    body = {
        "model": "tiny-q8_0",
        "messages": [{"role": "user", "content": "the the the the"}],
        "temperature": 0, "stream": True, "max_tokens": 400 + index,
        "logprobs": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"authorization": f"Bearer {pool.api_key}"}
    try:
        with httpx.stream(
            "POST", f"{pool.url}/v1/chat/completions", json=body, headers=headers, timeout=60
        ) as answer:
            story.status = answer.status_code
            story.receipt = answer.headers.get("x-potluck-receipt", "")
            if answer.status_code != 200:
                story.error = json.loads(answer.read())["error"]["code"]
                return
            for line in answer.iter_lines():
                listen(story, line)
    except httpx.HTTPError:
        story.broke = True


def listen(story: Story, line: str) -> None:
    if line == "data: [DONE]":
        story.done = True
    elif line.startswith("data: "):
        frame = json.loads(line[6:])
        if "error" in frame:
            story.error = frame["error"]["code"]
            return
        story.usage = frame.get("usage") or story.usage
        if not frame["choices"]:
            return
        choice = frame["choices"][0]
        story.tokens += len((choice.get("logprobs") or {}).get("content") or [])
        story.text += choice["delta"].get("content") or ""
        story.finish = choice["finish_reason"] or story.finish


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory):
    with pools.running(tmp_path_factory.mktemp("kills")) as running:
        yield running


@pytest.fixture(scope="module")
def whole(pool: RunningPool) -> str:
    """What every stream should say: greedy answers are equal."""
    story = Story()
    tell(pool, STREAMS, story)
    assert story.finish in RIGHT_ENDS
    return story.text


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill(pool: RunningPool, whole: str, victim: str) -> None:
    pools.until(pool.ready, what="a ready pool")
    stories = [Story() for _ in range(STREAMS)]
    threads = [
        threading.Thread(target=tell, args=(pool, index, story))
        for index, story in enumerate(stories)
    ]
    for thread in threads:
        thread.start()
    pools.until(lambda: sum(bool(one.text) for one in stories) >= 4, what="streams that run")
    old = pool.pid(victim)
    psutil.Process(old).kill()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "a client still waits"

    for story in stories:
        broke = story.broke and victim == "gateway"
        assert story.ended_well or story.error or broke, story
        assert whole.startswith(story.text) or story.text.startswith(whole)
    pools.until(lambda: pool.pids().get(victim, old) != old, what="another start")
    pools.until(pool.ready, timeout_s=60, what="a ready pool")
    pools.until(lambda: len(ready_nodes(pool)) == 2, timeout_s=60, what="both nodes")
    pools.until(lambda: paid(pool, stories), timeout_s=60, what="receipts of all good answers")
    spared(pool, stories, victim)
    status = pool.get("/status")
    assert status["books_balance"]
    again = Story()
    tell(pool, 0, again)
    assert again.finish in RIGHT_ENDS


def ready_nodes(pool: RunningPool) -> list[str]:
    return [
        node["name"]
        for node in pool.get("/nodes")["data"]
        if node["liveness"] == "alive"
        and any(replica["state"] == "ready" for replica in node["replicas"])
        and node["receipts_waiting"] == 0
    ]


def receipt_of(pool: RunningPool, story: Story) -> dict | None:
    if not story.receipt or story.status != 200:
        return None
    found = pool.http.get(f"/api/v1/receipts/{story.receipt}")
    return found.json() if found.status_code == 200 else None


def paid(pool: RunningPool, stories: list[Story]) -> bool:
    """Each whole answer has a settled receipt; no receipt counts more than its client was shown."""
    for story in stories:
        receipt = receipt_of(pool, story)
        if receipt is None:
            if story.ended_well:
                return False
            continue
        assert not receipt["refusal"]
        assert receipt["total_micro"] == receipt["provider_micro"] + receipt["fee_micro"]
        if not story.ended_well:
            assert receipt["completion_tokens"] <= story.tokens, (receipt, story)
            continue
        if receipt["outcome"] not in RIGHT_ENDS:
            return False
        assert story.usage is not None
        for kind in ("prompt_tokens", "completion_tokens"):
            assert receipt[kind] == story.usage[kind], (receipt, story)
        assert receipt["completion_tokens"] == story.tokens
    return True


def spared(pool: RunningPool, stories: list[Story], victim: str) -> None:
    """Whom a kill must not reach: streams end well that did not need the victim."""
    if victim == "gateway":
        return
    assert any(story.ended_well for story in stories), "every stream ended in an error"
    if not victim.startswith("node"):
        return
    killed = next(one["id"] for one in pool.get("/nodes")["data"] if one["name"] == victim)
    receipts = [(story, receipt_of(pool, story)) for story in stories]
    others = [story for story, found in receipts if found and found["node"] != killed]
    assert len(others) >= STREAMS // 4
    assert all(story.ended_well for story in others), others


def test_engines_that_are_killed_come_back(pool: RunningPool) -> None:
    pools.until(pool.ready, what="a ready pool")
    engines = [one for one in pool.descendants() if "bwrap" in one.name()]
    assert engines
    old = {one.pid for one in engines}
    for engine in engines:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()
    pools.until(
        lambda: {one.pid for one in pool.descendants() if "bwrap" in one.name()} - old,
        timeout_s=60, what="new engines",
    )  # fmt: skip
    pools.until(lambda: len(ready_nodes(pool)) == 2, timeout_s=60, what="both nodes")
    story = Story()
    tell(pool, 0, story)
    assert story.finish in RIGHT_ENDS


def test_no_message_of_the_logs_is_a_loose_error(pool: RunningPool) -> None:
    """What was killed may complain; nobody may trip over it."""
    for log in sorted(Path(pool.data_dir / "logs").glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            assert "loose error" not in line, f"{log.name}: {line[:1500]}"
