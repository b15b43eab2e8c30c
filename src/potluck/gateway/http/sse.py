"""Answers in the OpenAI shapes: SSE frames spliced from prepared parts, and the whole document.

Rule: the first delta carries the role, the last frame of a choice its finish_reason; a usage frame
has no choices and comes before `[DONE]`; nothing follows an error frame.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from potluck.gateway.http import errors
from potluck.gateway.http.errors import Problem
from potluck.gateway.serving.requests import Piece, Usage
from potluck.messages.serving import FinishReason

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode
_SHOWN_FINISH: Final[dict[FinishReason, bytes]] = {
    "stop": b'"stop"',
    "length": b'"length"',
    "cancelled": b'"stop"',
}


class Frames:
    """All frames of one streamed answer."""

    __slots__ = ("_content", "_finish", "_head", "_include_usage", "_opened", "_tail")

    def __init__(
        self, *, answer: str, created_s: int, model: str, fingerprint: str, include_usage: bool
    ) -> None:
        self._head = (
            b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,'
            b'"system_fingerprint":"%b","choices":['
            % (answer.encode(), created_s, _encode(model), fingerprint.encode())
        )
        self._content = b'%b{"index":0,"delta":{"content":' % self._head
        usage = b',"usage":null' if include_usage else b""
        self._tail = b'},"logprobs":null,"finish_reason":null}]%b}\n\n' % usage
        self._finish = b"}]%b}\n\n" % usage
        self._include_usage = include_usage
        self._opened: set[int] = set()

    def piece(self, piece: Piece) -> bytes:
        """One frame of content and, at the end, one with the reason."""
        index = piece.index
        if index == 0 and piece.finish is None and not piece.logprobs and index in self._opened:
            return b"%b%b%b" % (self._content, _encode(piece.text), self._tail)
        return self._content_frame(piece) + self._finish_frame(piece)

    def usage(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._head, usage_json(usage))

    def _content_frame(self, piece: Piece) -> bytes:
        first = piece.index not in self._opened
        if not first and not piece.text and not piece.logprobs:
            return b""
        self._opened.add(piece.index)
        return b'%b{"index":%d,"delta":{%b"content":%b},"logprobs":%b,"finish_reason":null%b' % (
            self._head,
            piece.index,
            b'"role":"assistant",' if first else b"",
            _encode(piece.text),
            _logprobs(piece.logprobs),
            self._finish,
        )

    def _finish_frame(self, piece: Piece) -> bytes:
        if piece.finish is None:
            return b""
        return b'%b{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b%b' % (
            self._head,
            piece.index,
            _SHOWN_FINISH[piece.finish],
            self._finish,
        )


def whole(
    *, answer: str, created_s: int, model: str, fingerprint: str,
    pieces: Sequence[Piece], usage: Usage,
) -> bytes:  # fmt: skip
    """The document of an answer that is not streamed: each choice comes in one piece."""
    shown = [
        b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":%b,'
        b'"finish_reason":%b}'
        % (
            piece.index,
            _encode(piece.text),
            _logprobs(piece.logprobs),
            _SHOWN_FINISH[piece.finish or "stop"],
        )
        for piece in pieces
    ]
    return (
        b'{"id":"%b","object":"chat.completion","created":%d,"model":%b,'
        b'"system_fingerprint":"%b","choices":[%b],"usage":%b}'
        % (
            answer.encode(),
            created_s,
            _encode(model),
            fingerprint.encode(),
            b",".join(shown),
            usage_json(usage),
        )
    )


def error_frame(problem: Problem) -> bytes:
    return b"data: %b\n\n" % errors.document(problem)


def usage_json(usage: Usage) -> bytes:
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
    )


def _logprobs(entries: bytes) -> bytes:
    return b'{"content":[%b],"refusal":null}' % entries if entries else b"null"
