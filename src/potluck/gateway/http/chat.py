"""From a request body to a `ChatAsk`, or to the problem with it, named by its parameter.

Rule: what would change the answer and is not supported is refused; what is merely unknown is
ignored, and named in a header.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.gateway.http.errors import Problem
from potluck.gateway.serving.asks import ChatAsk
from potluck.messages.serving import Sampling

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        str | Annotated[list[_Part], Meta(max_length=parameters.messages_per_request_max)] | None
    ) = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """Unknown fields are looked at one by one, and only where there are any."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[
        list[_Message], Meta(min_length=1, max_length=parameters.messages_per_request_max)
    ]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=parameters.choices_max)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=parameters.top_logprobs_max)] | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    ask: ChatAsk
    include_usage: bool
    ignored: Sequence[str]
    """Top-level fields that had no effect."""


class _OpenBody(_Body, forbid_unknown_fields=False):
    """The same with fields that were found harmless."""


_body_decoder = msgspec.json.Decoder(_Body)
_open_body_decoder = msgspec.json.Decoder(_OpenBody)
_fields_decoder = msgspec.json.Decoder(
    Annotated[dict[str, msgspec.Raw], Meta(max_length=parameters.fields_per_request_max)]
)
_encode = msgspec.json.Encoder().encode
_KNOWN: Final = frozenset(_Body.__struct_fields__)
_SILENT: Final = frozenset({"user", "metadata", "store", "safety_identifier", "service_tier"})
"""About bookkeeping, not about the answer."""
_NO_EFFECT: Final[dict[str, frozenset[bytes]]] = {
    "tools": frozenset({b"null", b"[]"}),
    "tool_choice": frozenset({b"null", b'"none"', b'"auto"'}),
    "functions": frozenset({b"null", b"[]"}),
    "function_call": frozenset({b"null", b'"none"', b'"auto"'}),
    "logit_bias": frozenset({b"null", b"{}"}),
    "presence_penalty": frozenset({b"null", b"0", b"0.0"}),
    "frequency_penalty": frozenset({b"null", b"0", b"0.0"}),
    "response_format": frozenset({b"null", b'{"type":"text"}'}),
    "modalities": frozenset({b"null", b'["text"]'}),
    "audio": frozenset({b"null"}),
}
"""Fields that would change the answer, with the values that would not."""
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_IGNORED_NAMED_MAX: Final = 16


def parse(body: bytes | bytearray) -> Parsed | Problem:
    ignored: Sequence[str] = ()
    try:
        try:
            asked = _body_decoder.decode(body)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            problem = _overdone(body)
            if problem is not None:
                return problem
            fields = _fields_decoder.decode(body)
            problem = _unsupported(fields)
            if problem is not None:
                return problem
            ignored = [name for name in fields if name not in _KNOWN and name not in _SILENT]
            asked = _open_body_decoder.decode(body)
    except msgspec.ValidationError as error:
        return _invalid(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Problem(Refusal.INVALID_REQUEST, f"The body is not valid JSON: {error}")
    except RecursionError:
        return _too_deep()
    problem = _flatten(asked.messages)
    if problem is not None:
        return problem
    stop = _stop(asked.stop)
    if isinstance(stop, Problem):
        return stop
    if asked.top_logprobs is not None and not asked.logprobs:
        return Problem(
            Refusal.INVALID_REQUEST, "top_logprobs needs logprobs to be true.", "top_logprobs"
        )
    return Parsed(
        _ask(asked, stop),
        bool(asked.stream_options and asked.stream_options.include_usage),
        ignored,
    )


def ignored_header(names: Sequence[str]) -> bytes:
    """Names that are safe in a header; the client wrote them."""
    safe = [name for name in names[:_IGNORED_NAMED_MAX] if _NAME.fullmatch(name)]
    return ", ".join(safe).encode()


def _ask(asked: _Body, stop: tuple[str, ...]) -> ChatAsk:
    most = asked.max_completion_tokens
    if most is None:
        most = asked.max_tokens
    return ChatAsk(
        model=asked.model,
        messages=_encode(asked.messages),
        max_tokens=most,
        sampling=Sampling(
            max_tokens=most or 0,
            temperature=asked.temperature,
            top_p=asked.top_p,
            stop=stop,
            seed=asked.seed,
            top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        ),
        stream=bool(asked.stream),
        choices=asked.n or 1,
    )


def _flatten(messages: list[_Message]) -> Problem | None:
    """Every content becomes one string, in place."""
    for index, message in enumerate(messages):
        if message.role == "developer":
            message.role = "system"  # Chat templates of open models know the older word only.
        elif message.role in ("tool", "function"):
            return Problem(
                Refusal.UNSUPPORTED_PARAMETER,
                f"Messages of role {message.role!r} are not supported.",
                f"messages[{index}].role",
            )
        content = message.content
        if isinstance(content, str):
            continue
        if content is None:
            if message.role != "assistant":
                return Problem(
                    Refusal.INVALID_REQUEST,
                    "A message needs content.",
                    f"messages[{index}].content",
                )
            message.content = ""
        else:
            text = _text(content, index)
            if isinstance(text, Problem):
                return text
            message.content = text
    return None


def _text(parts: list[_Part], index: int) -> str | Problem:
    for place, part in enumerate(parts):
        if part.type != "text":
            return Problem(
                Refusal.UNSUPPORTED_PARAMETER,
                "Only text parts are supported.",
                f"messages[{index}].content[{place}].type",
            )
        if part.text is None:
            return Problem(
                Refusal.INVALID_REQUEST,
                "A text part needs text.",
                f"messages[{index}].content[{place}].text",
            )
    return "".join([part.text or "" for part in parts])


def _stop(stop: str | list[str] | None) -> tuple[str, ...] | Problem:
    if stop is None:
        return ()
    words = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(words) > parameters.stop_sequences_max:
        most = parameters.stop_sequences_max
        return Problem(Refusal.INVALID_REQUEST, f"At most {most} stop sequences.", "stop")
    for word in words:
        if not word or len(word.encode()) > parameters.stop_sequence_bytes_max:
            most = parameters.stop_sequence_bytes_max
            return Problem(
                Refusal.INVALID_REQUEST, f"A stop sequence has 1 to {most} bytes.", "stop"
            )
    return words


def _unsupported(fields: dict[str, msgspec.Raw]) -> Problem | None:
    for name, raw in fields.items():
        if name in _KNOWN:
            continue
        harmless = _NO_EFFECT.get(name)
        if harmless is not None and _compact(raw) not in harmless:
            return Problem(
                Refusal.UNSUPPORTED_PARAMETER, f"{name!r} is not supported by this pool.", name
            )
    return None


def _compact(raw: msgspec.Raw) -> bytes:
    value = bytes(raw)
    if len(value) > parameters.harmless_value_bytes_max:
        return b""
    return b"".join(value.split())


_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_SPACE: Final = b" \t\r\n"


def _overdone(body: bytes | bytearray) -> Problem | None:
    """Known fields are typed, hence flat; what is unknown may nest. The body is valid JSON.

    A few passes at the speed of memory, whatever is in it: strings go, then the innermost pairs of
    brackets, a level at a time. What is left after so many levels is deeper.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    most = parameters.json_values_max
    if plain.translate(None, _SPACE).count(b'":') > most:
        return Problem(Refusal.INVALID_REQUEST, f"The JSON has more than {most} keys.")
    bare = plain.translate(_BRACKETS, _ALL_BUT_BRACKETS)
    # Two quotes side by side may go: what stands after them is inside or outside as before.
    bare = bare.replace(b'""', b"")
    quoted = bare.count(b'"') > 2 * most
    if not quoted:
        bare = b"".join(bare.split(b'"')[::2])
    if quoted or len(bare) > 2 * most:
        return Problem(Refusal.INVALID_REQUEST, f"The JSON has more than {most} lists and objects.")
    for _ in range(1 + parameters.json_depth_max):  # The body itself is one level more.
        bare = bare.replace(b"[]", b"")
    return _too_deep() if bare else None


def _too_deep() -> Problem:
    most = parameters.json_depth_max
    return Problem(Refusal.INVALID_REQUEST, f"The JSON is nested more than {most} deep.")


def _invalid(text: str) -> Problem:
    found = _PATH.search(text)
    param = (found.group(1) or None) if found else None
    message = text[: found.start()] if found else text
    if param is None and "missing required field" in message:
        param = message.rsplit("`", 2)[1]
    return Problem(Refusal.INVALID_REQUEST, message, param)
