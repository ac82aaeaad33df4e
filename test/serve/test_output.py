"""What a child writes: the last lines kept, the rest forwarded, both within bounds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phyai_engine.serve.output import FORWARD_BYTES, READ_BYTES, TAIL_LINES, ChildOutput


class Child:
    """The write ends of two streams and the reader under test."""

    def __init__(self) -> None:
        ends = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (write for _, write in ends)
        self.output = ChildOutput([os.fdopen(read, "rb") for read, _ in ends])

    def pump(self, count: int = 1) -> None:
        """That many periods."""
        for _ in range(count):
            self.output._next_s = 0.0
            self.output.pump()


@pytest.fixture
def child() -> Iterator[Child]:
    """Closed afterwards."""
    made = Child()
    yield made
    made.output.close()
    for end in (made.stdout, made.stderr):
        os.close(end)


def forwarded(child: Child, capfd: Any) -> str:
    """What reached our stderr."""
    child.output.close()
    return str(capfd.readouterr().err)


def test_whole_lines_are_forwarded_and_the_last_of_stderr_are_kept(child: Child, capfd: Any) -> None:
    os.write(child.stdout, b"loading\n")
    os.write(child.stderr, b"half of ")
    child.pump()
    os.write(child.stderr, b"a line\r10 %\r\n\n")
    os.write(child.stderr, b"the end")
    child.pump()
    assert child.output.lines() == ("half of a line", "10 %", "the end")
    assert forwarded(child, capfd).split("\n") == ["loading", "half of a line", "10 %", "", "", "the end", ""]


def test_stdout_is_told_where_stderr_is_silent(child: Child) -> None:
    assert child.output.lines() == ()
    os.write(child.stdout, b"only here\n")
    assert child.output.lines() == ("only here",)


def test_the_end_of_a_stream_ends_its_last_line(child: Child, capfd: Any) -> None:
    os.write(child.stderr, b"no newline")
    spare = os.dup(child.stderr)
    os.dup2(child.stdout, child.stderr)
    os.close(spare)
    child.pump(3)
    assert child.output.lines() == ("no newline",)
    assert forwarded(child, capfd) == "no newline\n"


def test_closing_loses_no_last_word(child: Child, capfd: Any) -> None:
    child.pump()
    os.write(child.stderr, b"the last words\nand half of a")
    child.output.close()
    assert forwarded(child, capfd) == "the last words\nand half of a\n"


def test_what_cannot_be_printed_or_put_in_a_message_is_replaced(child: Child) -> None:
    os.write(child.stderr, b"\x1b[31mred\x00 \xff\xfe\tend\n")
    (line,) = child.output.lines()
    assert line == "\ufffd[31mred\ufffd \ufffd\ufffd\tend"


def test_a_line_without_end_is_bounded(child: Child, capfd: Any) -> None:
    for _ in range(40):
        os.write(child.stderr, b"x" * 5000)
        child.pump()
    os.write(child.stderr, b"\nlast\n")
    *_, long, last = child.output.lines()
    assert last == "last" and len(long) < 20_000
    text = forwarded(child, capfd)
    assert text.count("x") == 200_000
    assert max(map(len, text.split("\n"))) < 10_000


def test_a_flood_is_dropped_and_counted_and_its_end_is_kept(child: Child, capfd: Any) -> None:
    block = b"".join(b"line %06d of the flood\n" % i for i in range(20_000))
    for stream in (child.stdout, child.stderr):
        threading.Thread(target=os.write, args=(stream, block), daemon=True).start()
    time.sleep(0.05)
    child.pump(10)
    lines = child.output.lines()
    assert len(lines) == TAIL_LINES and lines[-1] == "line 019999 of the flood"
    text = forwarded(child, capfd)
    kept = sum(len(line) + 1 for line in text.splitlines() if "flood" in line)
    assert child.output.dropped_bytes == 2 * len(block) - kept > 0
    said = [line for line in text.splitlines() if "dropped" in line]
    assert sum(int(line[1:].split()[0]) for line in said) == child.output.dropped_bytes


def test_a_period_forwards_no_more_than_its_share(child: Child, capfd: Any) -> None:
    os.write(child.stderr, b"w" * 99 + (b"\n" + b"w" * 99) * 2000 + b"\n")
    child.pump(5)
    assert 0.9 * FORWARD_BYTES < forwarded(child, capfd).count("w") <= FORWARD_BYTES


def test_a_period_reads_no_more_than_its_share(child: Child) -> None:
    done = threading.Event()
    size = 2 * READ_BYTES + 10_000
    writer = threading.Thread(target=lambda: (os.write(child.stderr, b"y" * 99 + b"\n" * (size - 99)), done.set()))
    writer.start()
    time.sleep(0.1)
    for _ in range(100):  # within one period
        child.output.pump()
    assert not done.wait(0.01)  # it waits in its own write
    for _ in range(200):
        child.pump()
        if done.wait(0.001):
            break
    writer.join(1.0)
    assert done.is_set()


def test_a_stderr_that_nobody_reads_holds_up_nobody(child: Child) -> None:
    read, write = os.pipe()
    saved = os.dup(2)
    os.dup2(write, 2)
    try:
        began = time.monotonic()
        for i in range(40):
            os.write(child.stderr, b"z" * 20_000 + b"%d\n" % i)
            child.pump()
        assert time.monotonic() - began < 0.5
        assert child.output.lines()[-1].endswith("z39")
        assert child.output.dropped_bytes > 0
        assert child.output.dropped_bytes + 2 * FORWARD_BYTES < 40 * 20_003
        began = time.monotonic()
        child.output.close()
        assert time.monotonic() - began < 0.5  # its thread is stuck in a write, and left there
    finally:
        os.dup2(saved, 2)
        for end in (read, write, saved):
            os.close(end)
    until = time.monotonic() + 2.0
    while any(thread.name == "phyai-engine-log" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
