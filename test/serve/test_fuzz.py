"""The parser against bytes that are no message: a short run of test/prove/fleet_fuzz.py, which does a million."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "prove"))

import fleet_fuzz


@pytest.mark.fault(24)
def test_damaged_messages_are_refused_and_nothing_else_happens() -> None:
    inputs, sound, peak_bytes = fleet_fuzz.run(5000)
    assert inputs >= 5000
    assert 0 < sound < inputs  # neither too damaged to get far nor hardly damaged
    assert peak_bytes < 4_000_000
