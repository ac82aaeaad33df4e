"""An mcap file read from its beginning, as far as it is whole: for files that were cut or that have no index.

The format is mcap's specification: records of opcode (1 byte), length (8 bytes) and content, most of them inside
compressed chunks. A recorder that lost its power leaves a file without summary and often half a chunk; what lies
before the first record that is not whole, or whose checksum is wrong, is read, and what is lost is said.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from phyai_engine.errors import BagError

MAGIC = b"\x89MCAP0\r\n"
MAX_CHUNK_BYTES = 1 << 30
"""Largest chunk that is unpacked: a damaged size field must not ask for more memory than there is."""

_HEADER, _FOOTER, _SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _DATA_END = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x0F
_LAST_KNOWN = _DATA_END
_READ = (_SCHEMA, _CHANNEL, _MESSAGE, _CHUNK)
_FOOTER_BYTES = 9 + 20 + len(MAGIC)


class Channel(NamedTuple):
    """One topic of the file. ``definition`` is the text of its message type, ``encoding`` that of its messages."""

    topic: str
    kind: str
    definition: str
    definition_format: str
    encoding: str


class Stored(NamedTuple):
    """One message as it is stored; ``received_ns`` is the recorder's time."""

    channel: int
    received_ns: int
    raw: memoryview


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds up to ``whole_bytes``.

    :param counts: messages per channel. :param start_ns: of the earliest message; ``end_ns`` of the latest, 0 for none.
    :param warning: why it was scanned and what is lost, a sentence.
    """

    channels: Mapping[int, Channel]
    counts: Mapping[int, int]
    start_ns: int
    end_ns: int
    whole_bytes: int
    warning: str


class _CutError(Exception):
    """The record at ``offset`` is not whole."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


def has_index(path: Path) -> bool:
    """True when the file ends with a footer that points to a summary.

    :raises BagError: it cannot be read, or is no mcap file.
    """
    with _open(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < len(MAGIC) + _FOOTER_BYTES:
            return False
        stream.seek(size - _FOOTER_BYTES)
        footer = stream.read()
    if not footer.endswith(MAGIC) or footer[:9] != struct.pack("<BQ", _FOOTER, 20):
        return False
    return int.from_bytes(footer[9:17], "little") > 0


def scan(path: Path) -> Scan:
    """Read every record once and say what is whole.

    :raises BagError: it cannot be read, or is no mcap file.
    """
    counts: Counter[int] = Counter()
    start_ns, end_ns = 1 << 64, 0
    cut: _CutError | None = None
    with _open(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        reader = _Reader(stream, size)
        try:
            for message in reader.messages():
                counts[message.channel] += 1
                start_ns, end_ns = min(start_ns, message.received_ns), max(end_ns, message.received_ns)
        except _CutError as error:
            cut = error
    return Scan(
        channels=reader.channels,
        counts=counts,
        start_ns=start_ns if counts else 0,
        end_ns=end_ns,
        whole_bytes=size if cut is None else cut.offset,
        warning=_warning(path, size, cut, counts),
    )


def messages(path: Path, found: Scan, channels: Collection[int]) -> Iterator[Stored]:
    """The messages of some channels, in the order of the file; within a chunk by time.

    :param found: what :func:`scan` said of the same file.
    """
    with _open(path) as stream, contextlib.suppress(_CutError):  # the cut that is known
        for message in _Reader(stream, found.whole_bytes).messages():
            if message.channel in channels:
                yield message


def _open(path: Path) -> BinaryIO:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise BagError("the bag cannot be read", got=error.strerror, where=path) from None
    magic = stream.read(len(MAGIC))
    if magic != MAGIC:
        stream.close()
        raise BagError(
            "not an mcap file", got=f"it begins with {magic!r}" if magic else "an empty file", wanted=MAGIC, where=path
        )
    return stream


def _warning(path: Path, size: int, cut: _CutError | None, counts: Mapping[int, int]) -> str:
    if cut is None:
        return f"{path.name} has no index: it was read from its beginning"
    return (
        f"{path.name} is not whole: {cut} at byte {cut.offset:,} of {size:,}; "
        f"what comes before it was read, {sum(counts.values()):,} messages"
    )


class _Reader:
    """Walks through one open file, which stands behind its magic."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.channels: dict[int, Channel] = {}
        self._stream, self._size = stream, size
        self._schemas: dict[int, tuple[str, str, str]] = {}

    def messages(self) -> Iterator[Stored]:
        """Every message.

        :raises _CutError: at the first record that is not whole, or where the file ends without closing records.
        """
        for offset, opcode, content in self._records():
            try:
                if opcode == _CHUNK:
                    batch = sorted(self._unpacked(content), key=lambda message: message.received_ns)
                elif opcode == _MESSAGE:
                    batch = [_message(memoryview(content))]
                else:
                    self._describe(opcode, _Fields(memoryview(content)))
                    continue
            except (ValueError, struct.error) as error:
                raise _CutError(offset, f"a record is damaged ({error})") from error
            yield from batch

    def _records(self) -> Iterator[tuple[int, int, bytes]]:
        """(offset, opcode, content) of the records that matter, up to the end of the messages."""
        while True:
            offset = self._stream.tell()
            if offset == self._size:
                raise _CutError(offset, "it ends without its closing records")
            head = self._stream.read(9)
            if len(head) < 9:
                raise _CutError(offset, "a record is cut")
            opcode, length = struct.unpack("<BQ", head)
            if not _HEADER <= opcode <= _LAST_KNOWN and opcode < 0x80:
                raise _CutError(offset, f"no record begins there (opcode {opcode})")
            if length > self._size - offset - 9:
                raise _CutError(offset, "a chunk is cut" if opcode == _CHUNK else "a record is cut")
            if opcode in (_DATA_END, _FOOTER):
                return
            if opcode in _READ:
                yield offset, opcode, self._stream.read(length)
            else:
                self._stream.seek(length, os.SEEK_CUR)

    def _unpacked(self, content: bytes) -> Iterator[Stored]:
        fields = _Fields(memoryview(content))
        fields.skip(16)  # times of the first and the last message
        size, checksum, compression = fields.u64(), fields.u32(), fields.text()
        if size > MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk of {size} bytes")
        records = _decompressed(compression, fields.sized(fields.u64()), size)
        if len(records) != size:
            raise ValueError(f"a chunk has {len(records)} bytes instead of {size}")
        if checksum and zlib.crc32(records) != checksum:
            raise ValueError("the checksum of a chunk is wrong")
        inner = _Fields(memoryview(records))
        while inner.left:
            opcode, length = inner.u8(), inner.u64()
            record = inner.sized(length)
            if opcode == _MESSAGE:
                yield _message(record)
            else:
                self._describe(opcode, _Fields(record))

    def _describe(self, opcode: int, fields: _Fields) -> None:
        if opcode == _SCHEMA:
            number, name, form = fields.u16(), fields.text(), fields.text()
            self._schemas[number] = (name, form, fields.text())
        elif opcode == _CHANNEL:
            number, schema, topic, encoding = fields.u16(), fields.u16(), fields.text(), fields.text()
            kind, form, definition = self._schemas.get(schema, ("unknown", "", ""))
            self.channels[number] = Channel(topic, kind, definition, form, encoding)


def _message(record: memoryview) -> Stored:
    fields = _Fields(record)
    channel = fields.u16()
    fields.skip(4)  # sequence
    received_ns = fields.u64()
    fields.skip(8)  # publish time, which rosbag2 sets to the time of receipt
    return Stored(channel, received_ns, fields.sized(fields.left))


def _decompressed(compression: str, packed: memoryview, size: int) -> bytes:
    """:raises ValueError: an unknown compression, or damaged content."""
    if not compression:
        return bytes(packed)
    from backports import zstd  # noqa: PLC0415 - with rosbags, which a robot may do without

    lz4: Any = importlib.import_module("lz4.frame")  # its types are of half of it
    try:
        if compression == "zstd":
            return bytes(zstd.ZstdDecompressor().decompress(packed, max_length=size))
        if compression == "lz4":
            return bytes(lz4.LZ4FrameDecompressor().decompress(packed, max_length=size))
    except (zstd.ZstdError, RuntimeError) as error:
        raise ValueError(f"a chunk cannot be unpacked: {error}") from error
    raise ValueError(f"unknown compression {compression!r}")


class _Fields:
    """Reads the fields of one record in order. ValueError or struct.error where it is too short."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._content) - self._at

    def sized(self, length: int) -> memoryview:
        if length > self.left:
            raise ValueError("a record is shorter than it says")
        self._at += length
        return self._content[self._at - length : self._at]

    def skip(self, length: int) -> None:
        self.sized(length)

    def text(self) -> str:
        return str(self.sized(self.u32()), "utf-8")

    def u8(self) -> int:
        return int.from_bytes(self.sized(1), "little")

    def u16(self) -> int:
        return int.from_bytes(self.sized(2), "little")

    def u32(self) -> int:
        return int.from_bytes(self.sized(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.sized(8), "little")
