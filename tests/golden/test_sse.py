"""What clients of the OpenAI API see, byte for byte."""

import os
from pathlib import Path

from potluck.core.refusals import Refusal
from potluck.gateway.http import sse
from potluck.gateway.http.errors import Problem
from potluck.gateway.http.sse import Frames
from potluck.gateway.serving.requests import Piece, Usage

FOLDER = Path(__file__).parent / "sse"
USAGE = Usage(prompt_tokens=40, completion_tokens=8, cost_micro=35)
ENTRY = b'{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}'


def check(name: str, shown: bytes) -> None:
    path = FOLDER / name
    if os.environ.get("POTLUCK_GOLDEN") == "write" and not path.exists():
        path.write_bytes(shown)
    assert shown == path.read_bytes()


def frames(*, include_usage: bool) -> Frames:
    return Frames(
        answer="chatcmpl-1", created_s=1_800_000_000, model="tiny", fingerprint="fp_abc",
        include_usage=include_usage,
    )  # fmt: skip


def test_a_stream_without_usage() -> None:
    made = frames(include_usage=False)
    parts = [
        made.piece(Piece(0, "Once", b"", None)),
        made.piece(Piece(0, ' "upon"\n', b"", None)),
        made.piece(Piece(0, "", b"", "stop")),
        made.usage(USAGE),
        sse.DONE,
    ]
    check("stream.txt", b"".join(parts))


def test_a_stream_with_usage_choices_and_logprobs() -> None:
    made = frames(include_usage=True)
    parts = [
        made.piece(Piece(0, "a", ENTRY, None)),
        made.piece(Piece(1, "é", b"", None)),
        sse.COMMENT,
        made.piece(Piece(1, "b", ENTRY, "length")),
        made.piece(Piece(0, "", b"", "cancelled")),
        made.usage(USAGE),
        sse.DONE,
    ]
    check("stream_usage.txt", b"".join(parts))


def test_an_error_frame() -> None:
    problem = Problem(Refusal.NODE_LOST, "the node fell silent")
    check("error.txt", sse.error_frame(problem))


def test_a_whole_answer() -> None:
    document = sse.whole(
        answer="chatcmpl-1", created_s=1_800_000_000, model="tiny", fingerprint="fp_abc",
        pieces=[Piece(0, "Once upon", ENTRY + b"," + ENTRY, "stop")], usage=USAGE,
    )  # fmt: skip
    check("whole.json", document)
