"""Bags of every form read alike; spoilt ones as far as they are whole, or refused in words. Nothing is written."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lz4.frame
import msgspec
import numpy as np
import pytest
from backports import zstd

from phyai_engine.config import Camera, RobotConfig
from phyai_engine.errors import BagError, RefusalError
from phyai_engine.messages import image_to_rgb, stamp_ns
from phyai_engine.replay import mcap_scan
from phyai_engine.replay.bag import Bag, Decoder, Topic
from phyai_engine.replay.topic_map import map_topics
from phyai_engine.types import Refusal

Make = Callable[..., RobotConfig]


@pytest.fixture(scope="module")
def long(bags: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of several mcap chunks; not to be changed."""
    script = bags.Script(size=(120, 160))
    return bags.write_bag(tmp_path_factory.mktemp("long") / "bag", script)  # type: ignore[no-any-return]


def contents(path: Path) -> list[tuple[str, int, bytes]]:
    with Bag(path) as bag:
        return [(m.topic, m.received_ns, bytes(m.raw)) for m in bag.messages(bag.topics)]


def copied(source: Path, target: Path) -> Path:
    """A copy of a recording's folder that may be spoilt."""
    return Path(shutil.copytree(source, target))


# -- whole bags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "compression"),
    [("mcap", ""), ("mcap", "storage"), ("mcap", "file"), ("mcap", "message"), ("sqlite3", ""), ("sqlite3", "file")],
)
def test_every_form_gives_the_same_messages(bags: ModuleType, tmp_path: Path, storage: str, compression: str) -> None:
    folder = bags.write_bag(tmp_path / "bag", storage=storage, compression=compression)
    before = sorted(folder.rglob("*"))
    with Bag(folder) as bag:
        assert bag.warnings == ()
        assert {t.name: (t.kind, t.messages) for t in bag.topics.values()} == {
            "/front/image_raw": ("sensor_msgs/msg/Image", 40),
            "/wrist/image_raw": ("sensor_msgs/msg/Image", 40),
            "/joint_states": ("sensor_msgs/msg/JointState", 200),
            "/policy_node/instruction": ("std_msgs/msg/String", 1),
        }
        assert (bag.start_ns, bag.end_ns) == (bags.START_NS, bags.START_NS + 1_991_000_000)
        images = list(bag.messages(["/front/image_raw"]))
        assert len(images) == 40
        third = bag.decode(images[2])
        assert stamp_ns(third.header.stamp) == bags.START_NS + 100_000_000
        assert images[2].received_ns == bags.START_NS + 106_000_000
        np.testing.assert_array_equal(image_to_rgb(third), bags.frame("front", 0.1, (24, 32)))
        joints = bag.decode(next(bag.messages(["/joint_states"])))
        assert (joints.name, joints.position.tolist()) == (["j0", "j1"], bags.position(0.0))
        times = [message.received_ns for message in bag.messages(bag.topics)]
        assert times == sorted(times)
        assert len(times) == 281
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_single_file_is_a_bag(bags: ModuleType, tmp_path: Path, storage: str, packed: bool) -> None:
    folder = bags.write_bag(tmp_path / "bag", storage=storage)
    whole, file = contents(folder), bags.storage_file(folder)
    if packed:
        target = tmp_path / f"{file.name}.zstd"
        target.write_bytes(zstd.compress(file.read_bytes()))
        file = target
    assert sorted(contents(file)) == sorted(whole)


def test_no_topic_is_no_message(bags: ModuleType, tmp_path: Path) -> None:
    with Bag(bags.write_bag(tmp_path / "bag")) as bag:
        assert list(bag.messages([])) == list(bag.messages(["/none"])) == []


def test_files_are_read_in_the_recorder_s_order(bags: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "split"
    folder.mkdir()
    for number in (0, 9, 10):
        script = bags.Script(seconds=0.2, received=lambda name, t, n=number: t + n)
        part = bags.write_bag(tmp_path / f"part{number}", script)
        shutil.copy(bags.storage_file(part), folder / f"split_{number}.mcap")
    with Bag(folder) as bag:
        assert "has no metadata.yaml" in bag.warnings[0]
        times = [m.received_ns for m in bag.messages(["/joint_states"])]
        assert times == sorted(times)
        assert len(times) == bag.topics["/joint_states"].messages == 60


# -- cut and spoilt mcap files -----------------------------------------------------------------------------------------


def test_a_cut_mcap_is_read_up_to_its_last_whole_chunk(long: Path, bags: ModuleType, tmp_path: Path) -> None:
    source = bags.storage_file(long)
    content, whole = source.read_bytes(), contents(source)
    chunks = bags.chunks(content)
    assert len(chunks) >= 4
    assert sum(messages for _, _, messages in chunks) == len(whole)
    cut = tmp_path / "cut.mcap"
    lengths = np.linspace(chunks[0][1], len(content) - 1, 23, dtype=int).tolist()
    for length in (*lengths, chunks[1][1], chunks[1][1] + 4, chunks[1][1] - 1):
        cut.write_bytes(content[:length])
        wanted = sum(messages for _, end, messages in chunks if end <= length)
        with Bag(cut) as bag:
            (warning,) = bag.warnings
            assert sum(topic.messages for topic in bag.topics.values()) == wanted
        assert contents(cut) == whole[:wanted]
        if wanted < len(whole):
            assert f"of {length:,}; what comes before it was read, {wanted:,} messages" in warning


def test_a_cut_file_of_a_folder_is_read_too(long: Path, bags: ModuleType, tmp_path: Path) -> None:
    folder = copied(long, tmp_path / "bag")
    file = bags.storage_file(folder)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with Bag(folder) as bag:
        assert "read file by file: a file of it is not whole" in bag.warnings[0]
        assert "a chunk is cut at byte" in bag.warnings[0]
        assert 0 < bag.topics["/front/image_raw"].messages < 40
        assert len(list(bag.messages(["/front/image_raw"]))) == bag.topics["/front/image_raw"].messages
    (folder / "metadata.yaml").unlink()
    with Bag(folder) as bag:
        assert "has no metadata.yaml" in bag.warnings[0]


def test_a_file_without_an_index_is_read_from_its_beginning(long: Path, bags: ModuleType, tmp_path: Path) -> None:
    whole = bags.storage_file(long)
    file = tmp_path / "plain.mcap"
    file.write_bytes(bags.without_index(whole.read_bytes()))
    with Bag(file) as bag:
        assert bag.warnings == ("plain.mcap has no index: it was read from its beginning",)
    assert contents(file) == contents(whole)


@pytest.mark.parametrize("compression", ["", "storage"])
def test_zeros_and_damage_end_what_is_read(bags: ModuleType, tmp_path: Path, compression: str) -> None:
    folder = bags.write_bag(tmp_path / "bag", bags.Script(size=(120, 160)), compression=compression)
    content = bags.storage_file(folder).read_bytes()
    chunks = [(at, end) for opcode, at, end in bags.records(content) if opcode == 0x06]
    file = tmp_path / "spoilt.mcap"
    file.write_bytes(content[: chunks[1][1]] + bytes(5000))  # a file system that kept the size and lost the blocks
    with Bag(file) as bag:
        assert "no record begins there (opcode 0)" in bag.warnings[0]
    two = len(contents(file))
    spoilt = bytearray(content[: chunks[2][1]])
    at = chunks[1][0] + 9 + 44
    spoilt[at : at + 64] = b"\xff" * 64  # where the second chunk's records begin
    file.write_bytes(spoilt)
    with Bag(file) as bag:
        assert "a record is damaged" in bag.warnings[0]
    assert 0 < len(contents(file)) < two


def handmade(compression: str, *, checksum: int | None = None) -> bytes:
    """An mcap file with one chunk of one topic and two messages out of order, cut before its closing records."""

    def record(opcode: int, content: bytes) -> bytes:
        return struct.pack("<BQ", opcode, len(content)) + content

    def text(value: str) -> bytes:
        return struct.pack("<I", len(value)) + value.encode()

    inner = record(3, struct.pack("<H", 1) + text("std_msgs/msg/String") + text("ros2msg") + text("string data"))
    inner += record(4, struct.pack("<HH", 7, 1) + text("/said") + text("cdr") + struct.pack("<I", 0))
    for time_ns, word in ((20, "b"), (10, "a")):
        inner += record(5, struct.pack("<HIQQ", 7, 0, time_ns, time_ns) + b"\x00\x01\x00\x00" + text(word + "\0"))
    pack = {"": bytes, "lz4": lz4.frame.compress, "zstd": zstd.compress, "brotli": bytes}
    packed = pack[compression](inner)
    crc = zlib.crc32(inner) if checksum is None else checksum
    chunk = struct.pack("<QQQI", 10, 20, len(inner), crc) + text(compression) + struct.pack("<Q", len(packed)) + packed
    return b"\x89MCAP0\r\n" + record(1, text("ros2") + text("by hand")) + record(6, chunk)


@pytest.mark.parametrize("compression", ["", "lz4", "zstd"])
def test_chunks_are_unpacked_and_put_in_order(tmp_path: Path, compression: str) -> None:
    file = tmp_path / "said.mcap"
    file.write_bytes(handmade(compression))
    with Bag(file) as bag:
        messages = list(bag.messages(["/said"]))
        assert [(m.received_ns, bag.decode(m).data) for m in messages] == [(10, "a"), (20, "b")]
        assert (bag.start_ns, bag.end_ns) == (10, 20)
        assert "it ends without its closing records" in bag.warnings[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (handmade("zstd", checksum=5), "the checksum of a chunk is wrong"),
        (handmade("brotli"), "unknown compression 'brotli'"),
        (b"\x89MCAP0\r\n", "it ends without its closing records"),
        (handmade("")[:40], "a record is cut"),
    ],
)
def test_an_mcap_without_a_whole_chunk_holds_no_message(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "bad.mcap"
    file.write_bytes(content)
    with pytest.raises(BagError, match=f"the bag holds no message.*{words}"):
        Bag(file)


def test_a_size_field_that_asks_for_gigabytes_is_damage(tmp_path: Path) -> None:
    content = bytearray(handmade("zstd"))
    at = content.index(b"\x04\x00\x00\x00zstd") - 12
    content[at : at + 8] = struct.pack("<Q", mcap_scan.MAX_CHUNK_BYTES + 1)
    file = tmp_path / "big.mcap"
    file.write_bytes(bytes(content))
    with pytest.raises(BagError, match="a chunk of 1073741825 bytes"):
        Bag(file)


# -- refused bags ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_an_empty_bag_is_refused(bags: ModuleType, tmp_path: Path, storage: str) -> None:
    script = bags.Script(received=lambda name, t: None, instruction="")
    folder = bags.write_bag(tmp_path / "empty", script, storage=storage)
    with pytest.raises(BagError, match=r"the bag holds no message, at .*empty"):
        Bag(folder)


def write_text(path: Path) -> None:
    path.write_text("no bag", encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("none", lambda path: None, "no such bag, at .*none. Name a rosbag2 folder, a .mcap or a .db3 file"),
        ("old.bag", write_text, "not a rosbag2 recording, got .bag, wanted a rosbag2 folder"),
        ("plain", write_text, "not a rosbag2 recording, got no suffix"),
        ("text.mcap", write_text, "not an mcap file, got it begins with b'no bag'"),
        ("empty.mcap", Path.touch, "not an mcap file, got an empty file"),
        ("text.db3", write_text, "the bag cannot be read, got "),
        ("folder", Path.mkdir, "the folder holds no recording, wanted a rosbag2 folder"),
    ],
)
def test_what_is_no_bag_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path / name)
    with pytest.raises(BagError, match=words):
        Bag(tmp_path / name)


def test_a_spoilt_sqlite_file_is_refused(bags: ModuleType, tmp_path: Path) -> None:
    folder = bags.write_bag(tmp_path / "bag", storage="sqlite3")
    file = bags.storage_file(folder)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 3])
    with pytest.raises(BagError, match=r"the bag (cannot be read|breaks off), got "), Bag(folder) as bag:
        list(bag.messages(bag.topics))


def test_a_message_that_does_not_follow_its_type_is_refused() -> None:
    decoder = Decoder({"/s": Topic("/s", "std_msgs/msg/String", 1, "string data")})
    assert decoder.decode("/s", b"\x00\x01\x00\x00\x03\x00\x00\x00hi\x00").data == "hi"
    for raw in (b"", b"\x00\x01\x00\x00", b"\x00\x01\x00\x00\xff\xff\xff\x7fhi\x00"):
        with pytest.raises(RefusalError, match=r"not follow its type.*wanted std_msgs/msg/String, at /s") as caught:
            decoder.decode("/s", raw)
        assert caught.value.code is Refusal.MALFORMED


def test_types_without_a_definition_are_jazzy_s_or_refused() -> None:
    decoder = Decoder({"/s": Topic("/s", "std_msgs/msg/String", 1, ""), "/o": Topic("/o", "other_msgs/msg/Any", 1, "")})
    assert decoder.decode("/s", b"\x00\x01\x00\x00\x03\x00\x00\x00hi\x00").data == "hi"
    with pytest.raises(BagError, match="does not define a message type, got other_msgs/msg/Any, at /o"):
        decoder.decode("/o", b"\x00\x01\x00\x00")
    broken = Decoder({"/b": Topic("/b", "a/msg/B", 1, "this is : no definition")})
    with pytest.raises(BagError, match=r"the bag's definition of a message type cannot be used.*/b: a/msg/B"):
        broken.decode("/b", b"\x00\x01\x00\x00")


# -- topics ------------------------------------------------------------------------------------------------------------


def test_topics_are_found_with_and_without_a_namespace(bags: ModuleType, bag_robot: Make, tmp_path: Path) -> None:
    with Bag(bags.write_bag(tmp_path / "bag")) as bag:
        found = map_topics(bag_robot(), bag)
        assert list(found.inputs.items()) == [
            ("/front/image_raw", "front"),
            ("/wrist/image_raw", "wrist"),
            ("/joint_states", "joint_states"),
        ]
        assert found.instruction == "/policy_node/instruction"
    moved = {"front": "/arm/front/image_raw", "wrist": "/arm/wrist/image_raw"}
    with Bag(bags.write_bag(tmp_path / "moved", bags.Script(topics=moved, instruction=""))) as bag:
        with pytest.raises(BagError) as caught:
            map_topics(bag_robot(), bag)
        text = str(caught.value)
        assert "/front/image_raw (camera 'front') is missing; did you mean /arm/front/image_raw" in text
        assert "/wrist/image_raw (camera 'wrist') is missing; did you mean /arm/wrist/image_raw" in text
        assert "/joint_states" not in text.partition("The bag holds")[0]
        with pytest.raises(BagError, match=r"/arm/joint_states \(joints j0\.\.\.\) is missing; did you mean"):
            map_topics(bag_robot(), bag, "arm")


def test_another_type_an_empty_and_a_shared_topic_are_listed(bags: ModuleType, bag_robot: Make, tmp_path: Path) -> None:
    script = bags.Script(
        compressed=["front"], received=lambda name, t: None if name == "joints" else t, camera_hz=5.0, instruction=""
    )
    with Bag(bags.write_bag(tmp_path / "bag", script)) as bag:
        with pytest.raises(BagError) as caught:
            map_topics(bag_robot(), bag)
        text = str(caught.value)
        assert (
            "/front/image_raw (camera 'front') has type sensor_msgs/msg/CompressedImage, wanted sensor_msgs/msg/Image: "
            "set the camera's transport to compressed" in text
        )
        assert "/joint_states (joints j0...) holds no message" in text
        robot: Any = bag_robot(("wrist",))
        twice = (*robot.cameras, Camera(name="other", topic="wrist/image_raw", role="base_0_rgb"))
        with pytest.raises(BagError, match="cameras 'wrist' and 'other' share it"):
            map_topics(msgspec.structs.replace(robot, cameras=twice), bag)
