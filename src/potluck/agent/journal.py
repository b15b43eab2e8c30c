"""What must survive `kill -9`: attempts begun, what was acknowledged of them, final receipts.

An append-only file of records: length, CRC-32, MessagePack. Written through the page cache, not
synced: it survives the process, and a power cut may cost the last seconds. A torn tail is cut off.
"""

import contextlib
import os
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


@dataclass(slots=True)
class Unfinished:
    """An attempt that was cut off, as the journal tells it."""

    receipt: Receipt
    prompt_tokens: int = 0
    tokens: int = 0
    data: bytearray = field(default_factory=bytearray)
    ended: Ended | None = None


class Journal:
    """Raises `OSError` from `write` if the disk is full; the record is then not in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.unfinished: dict[ReceiptId, Unfinished] = {}
        self.final: dict[ReceiptId, bytes] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = self._replay()
        self._compact_at = parameters.journal_compact_bytes
        self.compact()

    def close(self) -> None:
        os.close(self._file)

    def write(self, record: Record) -> None:
        """Remembers, then appends: what cannot be written is still known to this process."""
        self._apply(record)
        framed = _framed(record)
        try:
            if os.pwrite(self._file, framed, self._size) != len(framed):
                raise OSError("the journal's disk is full")
        except OSError:
            # Half a record would hide all that follow it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(framed)
        if self._size > self._compact_at:
            self.compact()

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
        end = 0
        for record, after in _records(content):
            self._apply(record)
            end = after
        os.ftruncate(self._file, end)
        return end

    def compact(self) -> None:
        """Only what is alive, in a new file that takes the old one's place whole."""
        partial = self._path.with_name(self._path.name + ".part")
        try:
            content = b"".join(_framed(record) for record in self._alive())
            partial.write_bytes(content)
            partial.chmod(0o600)
            file = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
            partial.replace(self._path)
        except OSError:
            # No room for a second file: go on with the old one, and try again much later.
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            self._compact_at = self._size * 2
            return
        os.close(self._file)
        self._file, self._size = file, len(content)
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


def _records(content: bytes) -> Iterator[tuple[Record, int]]:
    """Whole records and the offset after each; ends at the first that is torn."""
    at = 0
    while at + _HEADER.size <= len(content):
        size, checksum = _HEADER.unpack_from(content, at)
        end = at + _HEADER.size + size
        body = content[at + _HEADER.size : end]
        if size > _RECORD_BYTES_MAX or len(body) != size or zlib.crc32(body) != checksum:
            return
        try:
            record = _decoder.decode(body)
        except msgspec.DecodeError:
            return
        yield record, end
        at = end
