"""Chunks: order, seams, shapes, values. What cannot be played is refused whole, and the chunk before goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from phyai_engine.adapter import Adapter
from phyai_engine.config import ModelConfig, Normalisation, load_robot, resolve
from phyai_engine.errors import ConfigError, ProtocolError
from phyai_engine.policy import load_policy
from phyai_engine.serve import protocol as wire
from phyai_engine.serve import streams
from phyai_engine.types import (
    AbortCause,
    Chunk,
    CommandKind,
    ModelSpec,
    Observation,
    Request,
    SafetyState,
    Schedule,
    StageTimings,
)

Make = Callable[..., Any]
ARM = load_robot(resolve("robots", "arm7"))
REST = np.array([0.5 * (a.lower + a.upper) for a in ARM.actions])
DT_S, HORIZON = 0.02, 16


def seen_at_rest() -> Request:
    images = {c.name: np.zeros((4, 4, 3), dtype=np.uint8) for c in ARM.cameras}
    seen = Observation(images, REST, np.full(7, np.nan), "", 1, 2, 3, 4)
    return Request(5, 1, seen, None, seed=1, remaining_ms=50.0)


def fake_model(**options: Any) -> ModelConfig:
    cameras = ["base_0_rgb", "left_wrist_0_rgb"]
    given = {"cameras": cameras, "image_size": 8, **options}
    return ModelConfig(family="fake", normalisation=Normalisation(kind="limits"), options=given)


def over_the_wire(chunk: Chunk) -> Chunk:
    """The chunk as a client reads it from the engine's process."""
    frames = [bytes(frame) for frame in wire.encode(*streams.chunk_to_wire(chunk))]
    message, arrays = wire.decode(frames)
    assert isinstance(message, wire.Reply)
    return streams.chunk_from_wire(message, arrays)


# -- order and width -----------------------------------------------------------------------------------------


@pytest.mark.fault(21, 47)
def test_a_ramp_stays_a_ramp_from_a_padded_model_output_to_the_commands(bench: Make) -> None:
    """Every element of the model's answer is its own number, so any exchange of time and joint shows."""
    spec = ModelSpec("wide", HORIZON, 32, (1.0,), {}, tuple(c.role for c in ARM.cameras))
    adapter = Adapter(ARM, ModelConfig(family="wide"), spec)
    answer = np.full((HORIZON, 32), 9.0, dtype=np.float32)  # 9 rad in the padding: no joint may ever see it
    answer[:, :7] = np.arange(HORIZON)[:, None] * 2.0**-7 + np.arange(7) * 2.0**-3
    actions = over_the_wire(Chunk(1, 1, adapter.decode(answer, seen_at_rest()), StageTimings())).actions
    assert actions.shape == (HORIZON, 7)
    np.testing.assert_array_equal(actions, answer[:, :7])
    loop = bench()
    loop.loop.activate()
    loop.tick()
    loop.answer(actions[:, :2])
    loop.tick(HORIZON)
    np.testing.assert_array_equal([c.values for c in loop.commands], answer[:, :2])
    assert [c.step for c in loop.commands] == list(range(HORIZON))


@pytest.mark.fault(21)
def test_a_model_of_32_dimensions_drives_seven_joints(bench: Make) -> None:
    policy = load_policy(ARM, fake_model(horizon=50, action_dim=32))
    chunk = policy.infer([seen_at_rest()])[0]
    assert isinstance(chunk, Chunk)
    assert chunk.actions.shape == (50, 7)
    np.testing.assert_allclose(chunk.actions[0], REST, atol=1e-5)


@pytest.mark.fault(20)
def test_a_model_with_too_few_dimensions_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"fewer actions than robot arm7, got 6, wanted >= 7"):
        load_policy(ARM, fake_model(action_dim=6))


SHAPES = [(0, 2), (1, 2), (15, 2), (17, 2), (16, 1), (16, 3), (16,), (2,), (16, 2, 1), (1, 16, 2), (16, 0)]


@pytest.mark.fault(20, 21)
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chunk_of_another_shape_is_refused_and_the_one_before_goes_on(
    bench: Make, shape: tuple[int, ...], clamp: bool
) -> None:
    loop = bench(clamp=clamp)
    loop.start()
    loop.tick(10)
    loop.answer(np.full(shape, 0.05))
    assert loop.timings[-1].outcome == "refused"
    assert loop.timings[-1].refusal == "malformed"
    loop.tick(3)
    np.testing.assert_allclose(loop.values(), 0.01 * np.arange(13), atol=1e-12)
    assert loop.safety is SafetyState.RUNNING


@pytest.mark.fault(23)
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_refuses_the_whole_chunk(bench: Make, bad: float, clamp: bool) -> None:
    loop = bench(clamp=clamp)
    loop.start()
    loop.tick(10)
    if clamp and np.isinf(bad):
        bad = np.nan  # the clamp that was asked for limits an infinity, and reports it
    for row, joint in itertools.product(range(HORIZON), range(2)):
        actions = loop.ramp(0.5, np.array([0.1, 0.1]))
        actions[row, joint] = bad
        loop.tick()
        loop.answer(actions)
        assert loop.timings[-1].refusal == "not_finite"
        text = loop.timings[-1].text
        assert f"{('shoulder', 'elbow')[joint]} is not finite" in text
        assert f"row {row}" in text
    assert np.isfinite([c.values for c in loop.commands]).all()
    assert max(loop.values()) == pytest.approx(0.15, abs=0.05)  # only the first chunk was ever played


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "int64", "bool", "complex128", "object"])
def test_a_chunk_of_another_type_is_a_protocol_error(dtype: str) -> None:
    chunk = Chunk(1, 1, np.zeros((HORIZON, 2)).astype(dtype), StageTimings())
    with pytest.raises(ProtocolError):
        over_the_wire(chunk)


@pytest.mark.parametrize("layout", ["big_endian", "column_major", "strided", "reversed"])
def test_the_layout_in_memory_does_not_change_a_chunk(layout: str) -> None:
    rows = np.arange(HORIZON * 2, dtype=np.float64).reshape(HORIZON, 2) * 1e-3
    given = {
        "big_endian": rows.astype(">f8"),
        "column_major": np.asfortranarray(rows),
        "strided": np.repeat(rows, 2, axis=1)[:, ::2],
        "reversed": rows[::-1].copy()[::-1],
    }[layout]
    np.testing.assert_array_equal(over_the_wire(Chunk(1, 1, given, StageTimings())).actions, rows)


# -- seams ---------------------------------------------------------------------------------------------------


@pytest.mark.fault(2)
@pytest.mark.parametrize("schedule", [Schedule.NAIVE_ASYNC, Schedule.RTC])
@pytest.mark.parametrize("delay", range(8))
def test_a_chunk_of_an_older_observation_never_steps_back(bench: Make, schedule: Schedule, delay: int) -> None:
    loop = bench(schedule)
    loop.start()
    while len(loop.engine.requests) < 2:
        loop.tick()
    begun = len(loop.commands) - 1  # rows played before the tick that took the observation
    loop.tick(delay)
    loop.answer(loop.ramp(0.5, np.full(2, 0.01 * begun)))
    loop.tick(HORIZON - delay - 1)
    np.testing.assert_allclose(loop.values(), 0.01 * np.arange(begun + HORIZON), atol=1e-12)
    assert loop.timings[-1].delay_steps == delay + 1
    assert set(loop.kinds()) == {CommandKind.ACTION}


@pytest.mark.fault(2)
def test_a_seam_that_steps_back_is_refused(bench: Make) -> None:
    loop = bench()
    loop.start(1.0)
    loop.tick(12)
    loop.answer(loop.ramp(1.0, np.zeros(2)))  # computed for where the arm was 12 steps ago
    assert loop.timings[-1].refusal == "out_of_envelope"
    assert "shoulder jumps from the last command" in loop.timings[-1].text
    loop.tick(2)
    assert (np.diff(loop.values()) > 0).all()


def test_what_was_clamped_is_what_the_next_chunk_continues(bench: Make) -> None:
    """As it was commanded, not as the model had meant it: else the next chunk continues a motion that never was."""
    loop = bench(clamp=True)
    loop.state = np.full(2, 1.9)
    loop.start()  # 10 mrad a step, up to 2.05 rad; the limit is 2
    while len(loop.engine.requests) < 2:
        loop.tick()
    committed = loop.engine.requests[-1].committed
    assert committed is not None and "10 values clamped" in loop.timings[0].text
    np.testing.assert_allclose(committed.actions[:, 0], np.minimum(1.98 + 0.01 * np.arange(8), 2.0))
    loop.tick(7)
    np.testing.assert_array_equal(loop.values()[8:], committed.actions[:, 0])


@pytest.mark.fault(3)
def test_waiting_for_the_first_chunk_skips_nothing(bench: Make) -> None:
    loop = bench()
    loop.loop.activate()
    loop.tick(35)  # 0.7 s
    assert loop.commands == []
    loop.answer(loop.ramp())
    loop.tick(3)
    assert loop.values() == pytest.approx([0.0, 0.01, 0.02])


@pytest.mark.fault(5)
@pytest.mark.parametrize("pause", [0, 3])
def test_committed_steps_are_cut_at_what_the_player_elsewhere_has_played(bench: Make, pause: int) -> None:
    """It plays one step a period, after ``pause`` periods, and its word arrives just before each tick of ours."""
    loop = bench(ticks=False)
    loop.start()
    played = -pause
    while len(loop.engine.requests) < 2:
        played += 1
        loop.written.reported = max(0, played)
        loop.tick()
    assert played == 8  # s
    committed = loop.engine.requests[-1].committed
    assert committed is not None
    np.testing.assert_allclose(committed.actions[:, 0], 0.01 * np.arange(8, HORIZON), atol=1e-12)
    loop.written.reported = played + 2
    loop.tick()
    loop.answer(loop.ramp(0.5, np.full(2, 0.08)))
    assert loop.written.chunks[-1][1:] == (8, 2)  # its row 0 is step 8, and row 2 is the next to play


@pytest.mark.fault(22)
def test_a_chunk_that_runs_out_at_speed_is_braked_then_held(bench: Make) -> None:
    loop = bench()
    loop.start(1.0)
    loop.tick(HORIZON + 15)
    values = np.array(loop.values())
    speed = np.diff(values) / DT_S
    assert speed[HORIZON - 2] == pytest.approx(1.0)
    assert (np.diff(speed[HORIZON - 2 :]) >= -5.0 * DT_S - 1e-9).all()
    assert (speed >= -1e-12).all()
    assert values[-1] == pytest.approx(0.3 + DT_S * sum(1.0 - 0.1 * k for k in range(1, 11)))
    assert speed[-5:] == pytest.approx(np.zeros(5))
    assert set(loop.kinds()[HORIZON:]) == {CommandKind.HOLD}


# -- late and repeated answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_inference_of_any_length_repeats_and_skips_no_step(bench: Make, schedule: Schedule, share: float) -> None:
    """The engine answers ``share`` horizons after each request, with the ramp that starts at the request's step."""
    loop = bench(schedule)
    loop.start(0.25)
    due = {1: (-1, 0)}  # chunk -> (tick of the answer, step of its row 0)
    for tick in range(HORIZON * 10):
        loop.tick()
        request = loop.engine.requests[-1]
        if request.chunk_id not in due:
            flight = loop.player.handoff.in_flight
            assert flight is not None
            due[request.chunk_id] = (tick + round(HORIZON * share) - 1, flight.consumed_at)
        at, base = due[request.chunk_id]
        if tick == at:
            loop.answer(loop.ramp(0.25, np.full(2, 0.005 * base)))
    played = [c for c in loop.commands if c.kind is CommandKind.ACTION]
    np.testing.assert_allclose([c.values[0] for c in played], 0.005 * np.arange(len(played)), atol=1e-12)
    assert sum(t.outcome == "accepted" for t in loop.timings) >= 3
    assert all(t.outcome == "accepted" for t in loop.timings)
    held = loop.kinds().count(CommandKind.HOLD)
    assert (held == 0) == (schedule is not Schedule.SYNC and share == 0.5)


@pytest.mark.fault(26)
def test_an_answer_after_the_timeout_is_never_taken_for_the_next(bench: Make) -> None:
    loop = bench(request_timeout_s=0.3, stop_hold_steps=1)
    loop.start()
    loop.tick(30)
    late = loop.engine.requests[-1]
    assert loop.player.safety.cause is AbortCause.INFERENCE_DEADLINE
    assert "not answered within 0.3 s" in loop.player.safety.text
    loop.answer(loop.ramp(0.5, np.full(2, 0.08)), late)
    loop.state = np.array(loop.commands[-1].values)
    loop.loop.rearm(0, active=True)
    loop.tick()
    fresh = loop.engine.requests[-1]
    assert fresh.epoch > late.epoch
    assert fresh.committed is None
    loop.answer(loop.ramp(-0.5), late)
    assert loop.player.handoff.playing is None
    count = len(loop.commands)
    loop.answer(loop.ramp(0.5), fresh)
    loop.answer(loop.ramp(-0.5), late)
    loop.answer(loop.ramp(-0.5), fresh)  # a duplicate
    loop.tick(3)
    assert [c.chunk_id for c in loop.commands[count:]] == [fresh.chunk_id] * 3
    assert (np.diff(loop.values()[count:]) > 0).all()
