"""What must survive `kill -9`: attempts begun, what was acknowledged of them, final receipts.

An append-only file of records: length, CRC-32, MessagePack. Written through the page cache, not
synced: it survives the process, and a power cut may cost the last seconds. A torn tail is cut off,
and a damaged record costs itself alone.

Rule: `append` gathers the records of one loop turn; `flush` comes before any word that needs them.
"""

import asyncio
import contextlib
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from potluck.core import parameters
from potluck.core.ids import ReceiptId
from potluck.messages.money import Receipt

log = logging.getLogger(__name__)
_HEADER: Final = struct.Struct(">II")
_RECORD_BYTES_MAX: Final = 16 * 1024 * 1024


class Begun(msgspec.Struct, array_like=True, tag="begun"):
    """`receipt` is filled in but for what is counted."""

    receipt: Receipt


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """Handed on by the gateway since the last one."""

    receipt: ReceiptId
    prompt_tokens: int
    tokens: int
    data: bytes


class Ended(msgspec.Struct, array_like=True, tag="ended"):
    """The engine is done; stands before `Done` leaves. Final once `last_tokens` are handed on."""

    receipt: ReceiptId
    prompt_tokens: int
    tokens: int
    outcome: str
    queue_ms: int
    prefill_ms: int
    decode_ms: int


class Closed(msgspec.Struct, array_like=True, tag="final"):
    """`body` is MessagePack of the receipt, to be signed over these bytes."""

    receipt: ReceiptId
    body: bytes


class Gone(msgspec.Struct, array_like=True, tag="gone"):
    """Acknowledged or refused by the coordinator: nothing is kept of it."""

    receipt: ReceiptId


Record = Begun | Progress | Ended | Closed | Gone
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


_START: Final = re.compile(rb"[\x92-\x9f](?:\xa5begun|\xa8progress|\xa5ended|\xa5final|\xa4gone)")
"""How each record begins: an array of some fields, the first of them its tag."""


@dataclass(slots=True)
class Unfinished:
    """An attempt that was cut off, as the journal tells it."""

    receipt: Receipt
    prompt_tokens: int = 0
    tokens: int = 0
    data: bytearray = field(default_factory=bytearray)
    ended: Ended | None = None


class Journal:
    """Raises `OSError` if the disk is full; what is remembered is then tried again later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.unfinished: dict[ReceiptId, Unfinished] = {}
        self.final: dict[ReceiptId, bytes] = {}
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._flushing: asyncio.Handle | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = self._replay()
        self._compact_at = parameters.journal_compact_bytes
        self.compact()

    def close(self) -> None:
        """Without what is gathered: say `flush` before."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._forget_gathered()
        if self._file >= 0:
            os.close(self._file)
        # Whoever still speaks must not write into a file that has got this number since.
        self._file = -1

    def begin(self, record: Begun) -> None:
        """At once, or not at all: what cannot be written is not begun."""
        framed = _framed(record)
        self.flush()
        self._write(framed)
        self._apply(record)

    def append(self, record: Progress | Ended | Closed | Gone) -> None:
        """Remembered now, in the file with the next `flush`, at the latest after this loop turn."""
        self._apply(record)
        framed = _framed(record)
        self._gathered.append(framed)
        self._gathered_bytes += len(framed)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush_late)

    def flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if not self._gathered:
            return
        try:
            self._write(b"".join(self._gathered))
        except OSError:
            # Kept for the next try; what grew too long is in memory, and compaction writes that.
            if self._gathered_bytes > parameters.journal_compact_bytes:
                self._forget_gathered()
                self._compact_at = 0
            raise
        self._forget_gathered()
        if self._size > self._compact_at:
            self.compact()

    def _flush_late(self) -> None:
        self._flushing = None
        try:
            self.flush()
        except OSError as error:
            log.error("journal: %s", error)

    def _forget_gathered(self) -> None:
        self._gathered = []
        self._gathered_bytes = 0

    def _write(self, framed: bytes) -> None:
        try:
            if os.pwrite(self._file, framed, self._size) != len(framed):
                raise OSError("the journal's disk is full")
        except OSError:
            # Half a record would be taken for damage.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(framed)

    def _apply(self, record: Record) -> None:
        match record:
            case Begun():
                self.unfinished[record.receipt.receipt] = Unfinished(record.receipt)
            case Progress():
                known = self.unfinished.get(record.receipt)
                if known is not None:
                    known.prompt_tokens = record.prompt_tokens
                    known.tokens += record.tokens
                    known.data += record.data
            case Ended():
                known = self.unfinished.get(record.receipt)
                if known is not None:
                    known.ended = record
            case Closed():
                self.unfinished.pop(record.receipt, None)
                self.final[record.receipt] = record.body
            case Gone():
                self.unfinished.pop(record.receipt, None)
                self.final.pop(record.receipt, None)

    def _replay(self) -> int:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        whole = end = 0
        for record, size_bytes, after in _records(content):
            self._apply(record)
            whole, end = whole + size_bytes, after
        if whole != len(content):
            log.warning("journal: %d of %d bytes are damaged", len(content) - whole, len(content))
        os.ftruncate(self._file, end)
        return end

    def compact(self) -> None:
        """Only what is alive, in a new file that takes the old one's place whole."""
        partial = self._path.with_name(self._path.name + ".part")
        file = -1
        try:
            content = b"".join(_framed(record) for record in self._alive())
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            file = os.open(partial, flags, 0o600)
            if os.pwrite(file, content, 0) != len(content):
                raise OSError("the journal's disk is full")
            # Before the old file goes: a power cut must not leave an empty one in its place.
            os.fsync(file)
            partial.replace(self._path)
        except OSError:
            # No room for a second file: go on with the old one, and try again much later.
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if file >= 0:
                os.close(file)
            self._compact_at = max(parameters.journal_compact_bytes, 2 * self._size)
            return
        os.close(self._file)
        self._file, self._size = file, len(content)
        self._forget_gathered()
        self._compact_at = max(parameters.journal_compact_bytes, 2 * self._size)

    def _alive(self) -> Iterator[Record]:
        for receipt, known in self.unfinished.items():
            yield Begun(known.receipt)
            yield Progress(receipt, known.prompt_tokens, known.tokens, bytes(known.data))
            if known.ended is not None:
                yield known.ended
        for receipt, body in self.final.items():
            yield Closed(receipt, body)


def _framed(record: Record) -> bytes:
    body = _encoder.encode(record)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def _records(content: bytes) -> Iterator[tuple[Record, int, int]]:
    """Whole records, each with its size and the offset after it; what is damaged is skipped."""
    at = 0
    while at + _HEADER.size <= len(content):
        found = _record_at(content, at)
        if found is not None:
            record, end = found
            yield record, end - at, end
            at = end
        else:
            at = _next_whole(content, at)


def _record_at(content: bytes, at: int) -> tuple[Record, int] | None:
    if at < 0 or at + _HEADER.size > len(content):
        return None
    size, checksum = _HEADER.unpack_from(content, at)
    end = at + _HEADER.size + size
    if size > _RECORD_BYTES_MAX or end > len(content):
        return None
    body = content[at + _HEADER.size : end]
    if zlib.crc32(body) != checksum:
        return None
    try:
        return _decoder.decode(body), end
    except msgspec.DecodeError:
        return None


def _next_whole(content: bytes, damaged: int) -> int:
    """Where the next whole record begins; the content's end if there is none."""
    size: int = _HEADER.unpack_from(content, damaged)[0]
    beyond = damaged + _HEADER.size + size
    if _record_at(content, beyond) is not None:
        # Its length is right: what it quotes is not looked at.
        return beyond
    for found in _START.finditer(content, damaged + _HEADER.size):
        at = found.start() - _HEADER.size
        if at > damaged and _record_at(content, at) is not None:
            return at
    return len(content)
