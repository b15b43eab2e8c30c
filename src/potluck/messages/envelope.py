"""What stands before every message's body: version, the sender's boot id and a sequence number.

Fixed 25 bytes, big-endian: `v` (1), boot ULID (16), sequence (8); then the body in MessagePack.
The header is outside the body, so that a body can be recorded once (outbox, receipts on disk),
signed, and sent again later under a fresh header.
"""

import struct
from typing import Final

import msgspec

from potluck.core import parameters
from potluck.core.ids import BootId
from potluck.core.replay import Window

VERSION: Final = 1
_HEADER: Final = struct.Struct(">B16sQ")
HEADER_BYTES: Final = _HEADER.size
_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES: Final = {letter: value for value, letter in enumerate(_CROCKFORD)}


class MalformedError(Exception):
    """A peer sent bytes that are no message; they are dropped and counted."""


class ReplayedError(Exception):
    """A message that was seen before, or that belongs to an earlier start of its sender."""


class VersionError(MalformedError):
    """A peer speaks a version of the wire that this side does not."""


class Stamp:
    """Numbers what one process sends during one start. Not for two threads."""

    def __init__(self, boot: BootId) -> None:
        self.boot = boot
        self._boot_bytes = boot_to_bytes(boot)
        self._sequence = 0

    def seal(self, body: bytes) -> bytes:
        self._sequence += 1
        return _HEADER.pack(VERSION, self._boot_bytes, self._sequence) + body


class Guard:
    """Refuses replays, with one window for each sender. For messages, not for answers."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}

    def open(self, sender: str, payload: bytes) -> memoryview:
        """The body. Raises `MalformedError`, `VersionError` or `ReplayedError`."""
        boot, sequence, body = split(payload)
        window = self._windows.get(sender)
        if window is None:
            if len(self._windows) >= parameters.senders_kept:
                # Forgetting the oldest opens its replays, which every handler answers by id anyway.
                del self._windows[next(iter(self._windows))]
            window = self._windows[sender] = Window()
        if not window.admit(boot, sequence):
            raise ReplayedError(sender)
        return body


def split(payload: bytes) -> tuple[BootId, int, memoryview]:
    if len(payload) < HEADER_BYTES:
        raise MalformedError("shorter than its header")
    version, boot, sequence = _HEADER.unpack_from(payload)
    if version != VERSION:
        raise VersionError(f"wire version {version}, this side speaks {VERSION}")
    return boot_from_bytes(boot), sequence, memoryview(payload)[HEADER_BYTES:]


def boot_to_bytes(boot: BootId) -> bytes:
    """26 Crockford letters of a ULID to its 16 bytes."""
    number = 0
    for letter in boot:
        number = number << 5 | _VALUES[letter]
    return number.to_bytes(16, "big")


_boots: dict[bytes, BootId] = {}


def boot_from_bytes(raw: bytes) -> BootId:
    known = _boots.get(raw)
    if known is None:
        number = int.from_bytes(raw, "big")
        known = BootId("".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5)))
        if len(_boots) >= parameters.senders_kept:
            _boots.clear()
        _boots[raw] = known
    return known


class Body(msgspec.Struct, array_like=True):
    """Base of all bodies: MessagePack arrays, fields in the order of their declaration.

    New fields go to the end, with a default, so that older bytes still decode.
    """


_encoder = msgspec.msgpack.Encoder()


def encode(body: msgspec.Struct) -> bytes:
    return _encoder.encode(body)
