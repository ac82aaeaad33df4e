"""Handoffs of the node at delays that fit and at one that does not; ``make prove-handoffs`` has the whole table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")

sys.path.append(str(Path(__file__).parents[1] / "prove"))

from handoffs import Heard, accepted, count_bases, jumps, late_by_count, wrong_steps
from phyai_policy.msg import ActionStep, PolicyStatus
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile

from phyai_engine.types import CommandKind
from phyai_ros.player_node import PlayerNode

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
TWO_SIDED = {"num_steps": 10, "detour": 0.006, "period_steps": 400.0}  # a side's change is below velocity_max


def drive(rig: Any, handoffs: int) -> Heard:
    """Run until so many handoffs were heard."""
    rig.start()
    rig.until(lambda: len(accepted(rig.timings)) > handoffs, 20.0)
    return Heard(rig.steps, accepted(rig.timings), count_bases(rig.timings))


def test_rtc_continues_what_naive_execution_jumps_away_from(make_rig: Make) -> None:
    ratios = {}
    for schedule in ("naive_async", "rtc"):
        rig = make_rig(model={"latency_ms": 60.0, **TWO_SIDED}, schedule=schedule)
        heard = drive(rig, 14)
        assert not wrong_steps(heard)
        wire = jumps(heard.steps)
        told = {t.chunk_id: t.jump for t in heard.timings if t.chunk_id in wire}
        assert len(told) >= 12 and told == pytest.approx(wire)
        # Frozen rows hold where the handoff was in time.
        in_time = [t for t in heard.timings[1:] if t.delay_steps <= t.delay_predicted_steps]
        assert len(in_time) >= 6 and np.isfinite([t.jerk for t in heard.timings[1:]]).all()
        ratios[schedule] = float(np.median([t.jump_ratio for t in in_time]))
        rig.until(lambda rig=rig: rig.status.jump_ratio_p99 > 0)
        assert np.isfinite([rig.status.jerk_p99, rig.status.action_age_p99_s]).all()
        if schedule == "rtc":
            assert rig.status.frozen_error_p99 < 0.02
            ages = [t.age_last_s for t in heard.timings[2:]]
            assert 8 * 0.02 < np.median(ages) < 16 * 0.02 + 0.2  # s rows and a delay old
        rig.node.trigger_deactivate()
    # Medians: the largest of a dozen is luck.
    assert ratios["naive_async"] > 2.0 and ratios["rtc"] < ratios["naive_async"] / 1.5, ratios


@pytest.mark.parametrize("schedule", ["naive_async", "rtc"])
def test_a_delay_beyond_what_a_chunk_covers_makes_the_robot_wait_and_is_told(make_rig: Make, schedule: str) -> None:
    rig = make_rig(model={"latency_ms": 250.0}, schedule=schedule)  # H - s is 160 ms
    heard = drive(rig, 5)
    assert not wrong_steps(heard)
    assert [t.fallback for t in heard.timings[2:]] == ["sync"] * (len(heard.timings) - 2)
    assert all(t.delay_steps == 0 and np.isnan(t.m_exhaust_s) for t in heard.timings[2:])
    assert CommandKind.HOLD in rig.kinds()
    rig.until(lambda: rig.status.fallback == "sync")
    assert "the robot waits for each chunk" in rig.status.fallback_text
    assert rig.status.misses_exhaust <= 2 and rig.status.safety_state != PolicyStatus.SAFETY_LATCHED
    rig.until(lambda: any("waits for each chunk" in a.status[0].message for a in rig.diagnostics))


def test_a_handoff_to_a_player_elsewhere_is_late_when_its_steps_say_so(make_rig: Make) -> None:
    def player(context: Any) -> list[Any]:
        return [PlayerNode(context=context, parameter_overrides=[Parameter("robot", value="arm7")])]

    rig = make_rig(output="chunks", model={"latency_ms": 60.0, **TWO_SIDED}, others=player)
    rig.peer.create_subscription(ActionStep, "player_node/step", rig._on_step, QoSProfile(depth=50))
    rig.start()
    rig.until(lambda: len(accepted(rig.timings)) > 12, 20.0)
    heard = Heard(rig.steps, rig.timings, {c.chunk_id: c.base_step for c in rig.chunks})
    assert not wrong_steps(heard)
    falsely, _ = late_by_count(heard)
    assert falsely == 0


def test_the_checkpoints_limit_of_the_delay_comes_from_the_engine(
    make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msgspec import structs

    from phyai_ros.engine import Engine

    start = Engine.start
    monkeypatch.setattr(Engine, "start", lambda self: structs.replace(start(self), rtc_max_delay=2))
    rig = make_rig(model={"latency_ms": 60.0})  # four steps
    rig.start()
    rig.until(lambda: rig.status.fallback == "sync")
    assert rig.node._session.loop.player.handoff.settings.delay_limit_steps == 2
    assert all(t.delay_predicted_steps <= 2 for t in rig.timings)
