"""Opens a rosbag2 recording: a folder, one .mcap or .db3 file, compressed or not. Needs rosbags (extra ``replay``).

rosbags reads what is whole. An mcap file that was cut or has no index is read by mcap_scan.py, with a warning. Nothing
is ever written beside the bag.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from phyai_engine.errors import BagError, RefusalError
from phyai_engine.replay import mcap_scan
from phyai_engine.types import Refusal

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # serialised messages begin with 0
_FORMS = "a rosbag2 folder, a .mcap or a .db3 file"


class Topic(NamedTuple):
    """One topic. ``kind`` is its message type, ``definition`` the text of that type, empty where the bag has none."""

    name: str
    kind: str
    messages: int
    definition: str


class Received(NamedTuple):
    """One message as it was recorded; ``received_ns`` is when, by the recorder's clock."""

    topic: str
    received_ns: int
    raw: bytes | memoryview


class _Source(NamedTuple):
    """One way to the messages: what it holds, and how to read some topics in the order of receipt."""

    topics: Sequence[Topic]
    start_ns: int
    end_ns: int
    read: Callable[[Collection[str]], Iterator[Received]]
    warning: str = ""


class Bag:
    """A recording. Use it as a context: it may hold unpacked files.

    :ivar topics: by name. :ivar warnings: what of it could not be read, a sentence each.
    :ivar start_ns: receipt of the first message; ``end_ns`` of the last.
    :raises BagError: no such bag, not readable, or without any message.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stack = ExitStack()
        try:
            self._sources = _sources(self.path, self._stack)
            self.warnings = tuple(source.warning for source in self._sources if source.warning)
            self.topics = _merged(self._sources)
            filled = [source for source in self._sources if any(topic.messages for topic in source.topics)]
            if not filled:
                raise BagError("the bag holds no message", where=self.path, do=" ".join(self.warnings) or None)
        except BaseException:
            self._stack.close()
            raise
        self.start_ns = min(source.start_ns for source in filled)
        self.end_ns = max(source.end_ns for source in filled)
        self._decoder = Decoder(self.topics)

    def __enter__(self) -> Bag:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free what was unpacked. Idempotent."""
        self._stack.close()

    @property
    def name(self) -> str:
        """Its folder's or file's name, for people."""
        return self.path.resolve().name

    def messages(self, topics: Collection[str]) -> Iterator[Received]:
        """The messages of these topics in the order of receipt.

        :raises BagError: the bag breaks off; what came before it was given.
        """
        for source in self._sources:
            read = source.read(topics)
            while True:
                try:
                    message = next(read, None)
                except (BagError, GeneratorExit):
                    raise
                except Exception as error:  # rosbags and sqlite raise what they please
                    raise BagError("the bag breaks off", got=_said(error), where=self.path) from error
                if message is None:
                    break
                yield message

    def decode(self, message: Received) -> Any:
        """The message with its fields as attributes, as rclpy's messages have them.

        :raises RefusalError: MALFORMED: it does not follow its type.
        :raises BagError: its type is not known.
        """
        return self._decoder.decode(message.topic, message.raw)


class Decoder:
    """Serialised messages -> objects, by the definitions in the bag, or else by Jazzy's.

    Every topic has a typestore of its own: two definitions of one type do not meet.
    """

    def __init__(self, topics: Mapping[str, Topic]) -> None:
        self._topics = topics
        self._stores: dict[str, Any] = {}

    def decode(self, topic: str, raw: bytes | memoryview) -> Any:
        """See :meth:`Bag.decode`."""
        kind = self._topics[topic].kind
        if topic not in self._stores:
            self._stores[topic] = _typestore(self._topics[topic])
        try:
            if bytes(raw[:4]) == _ZSTD_MAGIC:
                raw = _decompress(raw)
            return self._stores[topic].deserialize_cdr(raw, kind)
        except Exception as error:  # whatever rosbags raises for bytes that do not fit, asserts included
            raise RefusalError(
                Refusal.MALFORMED,
                "the message does not follow its type",
                got=f"{len(raw)} bytes ({_said(error)})",
                wanted=kind,
                where=topic,
            ) from error


def _typestore(topic: Topic) -> Any:
    """What reads the messages of one topic."""
    from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore  # noqa: PLC0415

    if not topic.definition:
        store = get_typestore(Stores.ROS2_JAZZY)
        if topic.kind not in store.fielddefs:
            raise BagError("the bag does not define a message type", got=topic.kind, where=topic.name)
        return store
    store = get_typestore(Stores.EMPTY)
    separator = "=" * 80 + "\n"
    try:
        if topic.definition.startswith(f"{separator}IDL: "):
            types = {}
            for part in topic.definition.split(separator)[1:]:
                types.update(get_types_from_idl(part.split("\n", 1)[1]))
        else:
            types = get_types_from_msg(topic.definition, topic.kind)
        store.register(types)
        store.get_msgdef(topic.kind)  # generates the reader: a type that it names may be missing
    except Exception as error:  # a text that cannot be parsed
        text = "the bag's definition of a message type cannot be used"
        raise BagError(text, got=_said(error), where=f"{topic.name}: {topic.kind}") from error
    return store


# -- the ways to the messages ------------------------------------------------------------------------------------------


def _sources(path: Path, stack: ExitStack) -> list[_Source]:
    """One source for what rosbags reads whole, else one for each storage file."""
    if path.is_dir():
        return _of_folder(path, stack)
    if path.is_file():
        return [_of_file(path, stack)]
    raise BagError("no such bag", where=path, do=f"Name {_FORMS}.")


def _of_folder(folder: Path, stack: ExitStack) -> list[_Source]:
    files = sorted((f for f in folder.iterdir() if _storage(f)), key=_in_order)
    if not files:
        raise BagError("the folder holds no recording", where=folder, wanted=_FORMS)
    if not (folder / "metadata.yaml").is_file():
        reason = "it has no metadata.yaml"
    elif not all(mcap_scan.has_index(f) for f in files if f.suffix == ".mcap"):
        reason = "a file of it is not whole or has no index"
    else:
        try:
            return [_whole(folder, stack)]
        except BagError as error:
            reason = f"as a whole it cannot be read ({error.got})"
    first, *rest = [_of_file(f, stack) for f in files]
    text = f"{folder.name} was read file by file: {reason}"
    return [first._replace(warning=f"{text}. {first.warning}".removesuffix(". ")), *rest]


def _of_file(file: Path, stack: ExitStack) -> _Source:
    storage = _storage(file)
    if not storage:
        raise BagError("not a rosbag2 recording", got=file.suffix or "no suffix", wanted=_FORMS, where=file)
    if file.suffix == ".zstd":
        file = _unpacked(file, stack)
    if storage == ".db3":
        return _whole(file, stack)
    if not mcap_scan.has_index(file):
        return _scanned(file)
    try:
        return _whole(file, stack)
    except BagError as error:
        text = f"{file.name} was read from its beginning: rosbags cannot read it ({error.got})"
        return _scanned(file)._replace(warning=text)


def _storage(file: Path) -> str:
    """``.mcap`` or ``.db3``, also of a packed file; empty for another file."""
    suffix = Path(file.stem).suffix if file.suffix == ".zstd" else file.suffix
    return suffix if suffix in (".mcap", ".db3") else ""


def _in_order(file: Path) -> list[tuple[str, int]]:
    """A recorder numbers its files: 10 comes after 9."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", file.name)]


def _whole(path: Path, stack: ExitStack) -> _Source:
    """A folder or file that rosbags reads. :raises BagError: it cannot."""
    from rosbags.interfaces import MessageDefinitionFormat  # noqa: PLC0415
    from rosbags.rosbag2 import Reader  # noqa: PLC0415

    try:
        reader = Reader(path)
        with ExitStack() as opening:
            opening.callback(_closed, reader)
            reader.open()
            opening.pop_all()
    except Exception as error:  # also the asserts, struct and sqlite errors of a damaged file
        raise BagError("the bag cannot be read", got=_said(error), where=path) from error
    stack.callback(_closed, reader)
    connections = list(reader.connections)

    def read(names: Collection[str]) -> Iterator[Received]:
        wanted = [c for c in connections if c.topic in names]
        if wanted:  # rosbags takes none for all
            for connection, received_ns, raw in reader.messages(connections=wanted):
                yield Received(connection.topic, received_ns, raw)

    topics = [
        Topic(c.topic, c.msgtype, c.msgcount, "" if c.msgdef.format is MessageDefinitionFormat.NONE else c.msgdef.data)
        for c in connections
    ]
    return _Source(topics, reader.start_time, reader.end_time - 1, read)


def _closed(reader: Any) -> None:
    with contextlib.suppress(Exception):  # one that was opened in part raises
        reader.close()


def _scanned(file: Path) -> _Source:
    """An mcap file as far as it is whole."""
    found = mcap_scan.scan(file)

    def read(names: Collection[str]) -> Iterator[Received]:
        numbers = {number for number, channel in found.channels.items() if channel.topic in names}
        for stored in mcap_scan.messages(file, found, numbers):
            yield Received(found.channels[stored.channel].topic, stored.received_ns, stored.raw)

    topics = [
        Topic(
            channel.topic,
            channel.kind if channel.encoding == "cdr" else f"{channel.kind} ({channel.encoding})",
            found.counts.get(number, 0),
            channel.definition if channel.definition_format in ("ros2msg", "ros2idl", "omgidl") else "",
        )
        for number, channel in found.channels.items()
    ]
    return _Source(topics, found.start_ns, found.end_ns, read, found.warning)


def _unpacked(file: Path, stack: ExitStack) -> Path:
    """A packed storage file, unpacked to a folder that goes with the stack; a cut one as far as it goes."""
    from backports import zstd  # noqa: PLC0415

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="phyai-bag-"))
    target = Path(folder) / file.stem
    unpacking = zstd.ZstdDecompressor()
    with file.open("rb") as packed, target.open("wb") as unpacked, contextlib.suppress(zstd.ZstdError):
        while block := packed.read(1 << 20):
            while block:
                unpacked.write(unpacking.decompress(block))
                block = unpacking.unused_data if unpacking.eof else b""
                unpacking = zstd.ZstdDecompressor() if unpacking.eof else unpacking
    return target


def _decompress(raw: bytes | memoryview) -> bytes:
    from backports import zstd  # noqa: PLC0415

    return bytes(zstd.decompress(raw))


def _merged(sources: Sequence[_Source]) -> dict[str, Topic]:
    """Topics of all sources by name, with the sum of their messages."""
    topics: dict[str, Topic] = {}
    for topic in (topic for source in sources for topic in source.topics):
        before = topics.get(topic.name, topic._replace(messages=0))
        kind = before.kind if before.kind == topic.kind else f"{before.kind} and {topic.kind}"
        topics[topic.name] = before._replace(kind=kind, messages=before.messages + topic.messages)
    return topics


def _said(error: Exception) -> str:
    """An error of another library in one line."""
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__
