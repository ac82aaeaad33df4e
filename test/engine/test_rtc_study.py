"""The study of handoff methods: task, timeline, methods, figures. A tiny net stands for the policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phyai_engine.rtc_study import play, scores
from phyai_engine.rtc_study.net import ChunkNet, Recipe, Trainer
from phyai_engine.rtc_study.play import Played, Timeline
from phyai_engine.rtc_study.sampling import CANDIDATES, GUIDANCE, Committed, Head, Method, draw, sample
from phyai_engine.rtc_study.scores import score
from phyai_engine.rtc_study.task import ACTIONS, HORIZON, Masses, Task, advance, demonstrate, touches

TINY = Recipe(demonstrations=60, width=24, blocks=1, batch=64, steps=60, learning_rate=5e-3)
DELAYS = range(HORIZON // 2 + 1)


@pytest.fixture(scope="module")
def head() -> Head:
    """A policy that has seen a little training: smooth in its inputs, and no two chunks alike."""
    trainer = Trainer(TINY)
    trainer.round()
    return Head(trainer.averaged)


def observations(n: int) -> np.ndarray:
    return np.random.default_rng(7).uniform((0.0, -0.5), (5.0, 0.5), (n, 2))


def start_noise(n: int, draws: int = 1) -> np.ndarray:
    return np.random.default_rng(8).standard_normal((draws, n, HORIZON, ACTIONS), dtype=np.float32)


def committed(n: int, delay: int) -> Committed:
    rows = np.random.default_rng(9).normal((1.0, 0.0), 0.4, (n, HORIZON - max(delay, 1), ACTIONS))
    return Committed(rows, delay)


# The task


def test_demonstrations_take_both_sides_and_pass_the_plate() -> None:
    task = Task()
    pairs = demonstrate(task, 400, seed=3)
    assert pairs.observations.shape == (len(pairs.chunks), ACTIONS)
    assert pairs.chunks.shape[1:] == (HORIZON, ACTIONS)
    x, y = pairs.observations.T
    beside = (x > task.plate_from) & (x < task.plate_to)
    assert np.abs(y[beside]).min() > task.plate_half  # touching ones are left out
    assert 0.4 < (y[beside] > 0).mean() < 0.6
    assert beside.mean() > 0.06  # they do get there: 0.5 of 6 m
    assert x.max() < task.goal


def test_demonstrations_that_touch_the_plate_are_left_out() -> None:
    task = Task(plate_half=1.35)  # they head for 1.4: many touch it
    kept, all_of_them = (demonstrate(each, 200, seed=3) for each in (task, Task(plate_half=0.0)))
    assert 0 < len(kept.chunks) < len(all_of_them.chunks)
    x, y = kept.observations.T
    assert np.abs(y[(x >= task.plate_from) & (x <= task.plate_to)]).min() > task.plate_half


def test_the_side_cannot_be_seen_before_the_decision() -> None:
    task = Task()
    pairs = demonstrate(task, 400, seed=3)
    x, y = pairs.observations.T
    before = (x > task.decide_from - 0.2) & (x < task.decide_from)
    last = pairs.chunks[before, -1, 1]  # lateral speed 0.7 s later: both ways, and nothing between
    assert (last > 0.4).mean() > 0.4
    assert (last < -0.4).mean() > 0.4
    assert abs(np.corrcoef(y[before], last)[0, 1]) < 0.5


def test_chunks_are_the_commands_from_their_observation_on() -> None:
    """Without noise, inertia and drift, the positions follow from the chunk."""
    task = Task(action_noise=0.0, response=1.0, drift=0.0)
    pairs = demonstrate(task, 3, seed=1)
    moved = pairs.observations[: -3 * HORIZON] + task.dt_s * pairs.chunks[: -3 * HORIZON, 0]
    np.testing.assert_allclose(moved, pairs.observations[3 : 3 - 3 * HORIZON], atol=1e-12)  # 3 episodes side by side


def test_a_mass_follows_its_command_with_inertia() -> None:
    masses = Masses(np.zeros((1, 2)), np.array([[1.0, 0.0]]))
    after = advance(Task(), masses, np.array([[0.0, 2.0]]), np.zeros((1, 2)))
    np.testing.assert_allclose(after.velocity, [[0.5, 1.0]])
    np.testing.assert_allclose(after.position, [[0.05, 0.1]])


def test_the_plate_is_where_it_is() -> None:
    at = np.array([[3.9, 0.0], [4.0, 0.0], [4.5, -1.0], [4.3, 1.01], [4.6, 0.5]])
    assert touches(Task(), at).tolist() == [False, True, True, False, False]


# The timeline


@pytest.mark.parametrize("delay", DELAYS)
def test_moving_methods_consume_one_row_per_tick(delay: int) -> None:
    line = Timeline(delay)
    assert line.execute == max(delay, 1)
    for chunk in range(6):
        first, end = line.handoff(chunk), line.handoff(chunk + 1)
        rows = [line.row(chunk, tick) for tick in range(first, end)]
        assert rows[0] == (0 if chunk == 0 else delay)  # d' = d
        assert rows == list(range(rows[0], rows[0] + len(rows)))
        assert rows[-1] < HORIZON
        if chunk:  # row 0 belongs to the tick of the observation
            assert rows[0] == first - line.observed(chunk)


@pytest.mark.parametrize("delay", DELAYS)
def test_sync_stands_while_it_infers(delay: int) -> None:
    line = Timeline(delay, stops=True)
    for chunk in range(4):
        assert [line.row(chunk, t) for t in range(line.handoff(chunk), line.observed(chunk + 1))] == list(
            range(line.execute)
        )
        assert line.handoff(chunk + 1) - line.observed(chunk + 1) == delay


@pytest.mark.parametrize("delay", [-1, HORIZON // 2 + 1])
def test_an_infeasible_delay_is_refused(head: Head, delay: int) -> None:
    with pytest.raises(ValueError, match=r"wanted 0\.\.4"):
        play.play(head, Task(), Method.TRAINED, delay, episodes=1, seed=1)


# The methods


def test_a_target_beyond_the_committed_rows_is_held_and_weighs_nothing() -> None:
    given = committed(2, 3)
    assert given.target.shape == (2, HORIZON, ACTIONS)
    np.testing.assert_array_equal(given.target[:, 5:], np.repeat(given.rows[:, -1:], 3, axis=1))
    assert given.weights.tolist()[:3] == [1, 1, 1]
    assert given.weights.tolist()[5:] == [0, 0, 0]
    assert 0 < given.weights[4] < given.weights[3] < 1


@pytest.mark.parametrize("method", GUIDANCE)
def test_without_committed_rows_every_method_draws_the_plain_chunk(head: Head, method: Method) -> None:
    plain = sample(head, observations(5), start_noise(5)[0])
    np.testing.assert_array_equal(draw(head, method, observations(5), start_noise(5), None), plain)


@pytest.mark.parametrize("method", [Method.NAIVE_ASYNC, Method.SYNC, Method.TEMPORAL_ENSEMBLE])
def test_free_methods_ignore_the_committed_rows(head: Head, method: Method) -> None:
    plain = sample(head, observations(5), start_noise(5)[0])
    np.testing.assert_array_equal(draw(head, method, observations(5), start_noise(5), committed(5, 3)), plain)


def test_trained_and_gauss_keep_the_frozen_rows(head: Head) -> None:
    given = committed(5, 3)
    for method in (Method.TRAINED, Method.GAUSS):
        chunk = draw(head, method, observations(5), start_noise(5), given)
        np.testing.assert_allclose(chunk[:, :3], given.rows[:, :3], atol=1e-5)
        assert np.abs(chunk[:, 3] - given.target[:, 3]).max() > 1e-3  # and no more than those
        assert np.abs(chunk[:, 3:] - sample(head, observations(5), start_noise(5)[0])[:, 3:]).max() > 1e-3


@pytest.mark.parametrize("method", [Method.IDENTITY, Method.VJP, Method.VJP_EARLY])
def test_guidance_pulls_towards_the_frozen_rows(head: Head, method: Method) -> None:
    given = committed(64, 3)
    free = sample(head, observations(64), start_noise(64)[0])
    chunk = draw(head, method, observations(64), start_noise(64), given)
    apart = [np.abs(made[:, :3] - given.rows[:, :3]).mean() for made in (chunk, free)]
    assert apart[0] < 0.7 * apart[1]


def test_the_pull_is_the_gradient_of_the_net(head: Head) -> None:
    x, cotangent = torch.randn(2, 3, HORIZON, ACTIONS, generator=torch.Generator().manual_seed(1)).double()
    prefix = torch.zeros(3, 2).double()
    wide = Head(ChunkNet(TINY.width, TINY.blocks).double())
    wide.net.load_state_dict(head.net.state_dict())
    u, pull = wide.velocity_vjp(prefix, x, 2)
    torch.testing.assert_close(u, wide.velocity(prefix, x, 2))
    step = 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double()
    change = wide.velocity(prefix, x + step, 2) - wide.velocity(prefix, x - step, 2)
    torch.testing.assert_close((pull(cotangent) * 2 * step).sum(), (cotangent * change).sum(), rtol=1e-6, atol=1e-12)


def test_trained_conditions_on_rows_that_are_clean(head: Head) -> None:
    """The frozen rows enter the net with flow time 0: another time for them is another velocity."""
    x = torch.from_numpy(start_noise(2)[0])
    prefix, clean = torch.zeros(2, 2), torch.arange(HORIZON)[None, :, None] < 3
    assert not torch.equal(head.velocity(prefix, x, 1, clean), head.velocity(prefix, x, 1))
    assert torch.equal(head.velocity(prefix, x, 1, clean & False), head.velocity(prefix, x, 1))


def test_bid_takes_the_draw_nearest_to_the_committed_rows(head: Head) -> None:
    given = committed(3, 2)
    noise = start_noise(3, CANDIDATES)
    drawn = np.stack([sample(head, observations(3), each) for each in noise])
    chosen = draw(head, Method.BID, observations(3), noise, given)
    for row in range(3):
        costs = [
            sum(w * np.linalg.norm(d[row, i] - given.target[row, i]) for i, w in enumerate(given.weights))
            for d in drawn
        ]
        np.testing.assert_allclose(chosen[row], drawn[int(np.argmin(costs)), row], atol=1e-5)


def test_the_ensemble_averages_live_chunks_oldest_first() -> None:
    line = Timeline(2)  # observed at 0, 2, 4; chunk 2 plays from tick 6, chunk 0 has rows up to tick 7
    chunks = [np.full((1, HORIZON, ACTIONS), float(k)) for k in range(3)]
    weights = np.exp(-0.01 * np.arange(3))
    wanted = (weights @ [0.0, 1.0, 2.0]) / weights.sum()
    np.testing.assert_allclose(play._command(Method.TEMPORAL_ENSEMBLE, line, chunks, 7), [[wanted, wanted]])
    late = play._command(Method.TEMPORAL_ENSEMBLE, line, chunks, 8)  # chunk 0 is over
    np.testing.assert_allclose(late, [[(weights[:2] @ [1.0, 2.0]) / weights[:2].sum()] * 2])


@pytest.mark.parametrize("method", Method)
def test_every_method_plays(head: Head, method: Method) -> None:
    for delay in (0, HORIZON // 2):
        played = play.play(head, Task(), method, delay, episodes=4, seed=5)
        assert np.isfinite(played.commands).all()
        cell = score(method.value, played, Task().dt_s)
        assert cell.episodes == 4
        assert (cell.frozen_error_m_s is None) == (delay == 0 or method is Method.SYNC)
        if method is Method.TRAINED and delay:
            assert cell.frozen_error_m_s is not None
            assert cell.frozen_error_m_s < 1e-5


@pytest.mark.parametrize("delay", DELAYS)
def test_what_is_committed_starts_at_the_observation(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Committed | None] = []

    def rows(head: object, method: Method, position: np.ndarray, noise: object, given: Committed | None) -> np.ndarray:
        seen.append(given)
        return np.tile(np.arange(float(HORIZON))[:, None] / HORIZON, (len(position), 1, ACTIONS))

    monkeypatch.setattr(play, "draw", rows)
    played = play.play(None, Task(), Method.VJP, delay, episodes=2, seed=1)  # type: ignore[arg-type]
    assert len(seen) == len(played.chunks) > 3
    assert seen[0] is None
    for given in seen[1:]:
        assert given is not None
        assert given.delay_steps == delay
        np.testing.assert_array_equal(given.rows[0, :, 0] * HORIZON, np.arange(max(delay, 1), HORIZON))


def test_a_cell_is_repeatable(head: Head) -> None:
    once, again = (play.play(head, Task(), Method.VJP, 4, episodes=4, seed=5) for _ in range(2))
    np.testing.assert_array_equal(once.commands, again.commands)
    other = play.play(head, Task(), Method.VJP, 4, episodes=4, seed=6)
    assert not np.array_equal(once.commands[0], other.commands[0])


def test_methods_meet_the_same_chance(head: Head) -> None:
    """The first chunk, and what happens until the first handoff, are the same for all."""
    first = [
        play.play(head, Task(), m, 2, episodes=3, seed=5) for m in (Method.NAIVE_ASYNC, Method.TRAINED, Method.BID)
    ]
    for played in first[1:]:
        np.testing.assert_allclose(played.chunks[0], first[0].chunks[0], atol=1e-5)
        np.testing.assert_allclose(played.commands[:4], first[0].commands[:4], atol=1e-5)


# The figures


def steady(offset: float, delay: int = 2, ticks: int = 8, **more: Any) -> Played:
    """Chunks that rise by 0.1 per row in x; each continues the one before, and is moved by ``offset``."""
    line = Timeline(delay, **more)
    count = 4
    chunks = np.zeros((count, 1, HORIZON, ACTIONS))
    for k in range(count):
        chunks[k, 0, :, 0] = 0.1 * (line.observed(k) + np.arange(HORIZON)) + offset * k
    commands = np.zeros((ticks, 1, ACTIONS))
    playing = 0
    for tick in range(ticks):
        while playing + 1 < count and tick >= line.handoff(playing + 1):
            playing += 1
        row = line.row(playing, tick)
        if not (line.stops and row >= line.execute):
            commands[tick, 0] = chunks[playing, 0, row]
    flags = np.zeros(1, bool)
    return Played(line, commands, np.ones((ticks, 1), bool), chunks, flags, ~flags, np.array([float(ticks)]))


def test_a_seamless_handoff_has_ratio_one_and_no_frozen_error() -> None:
    played = steady(0.0)
    np.testing.assert_allclose(scores.jump_ratios(played), [1.0, 1.0])  # handoffs at ticks 4 and 6
    assert scores.frozen_error(played) == pytest.approx(0.0, abs=1e-12)
    jerk, beside = scores.jerks(played, 0.1)
    np.testing.assert_allclose([jerk.max(), beside.max()], 0.0, atol=1e-9)


def test_an_offset_is_seen_in_ratio_jerk_and_frozen_error() -> None:
    played = steady(0.4)
    np.testing.assert_allclose(scores.jump_ratios(played), [5.0, 5.0])  # (0.1 + 0.4) / 0.1
    assert scores.frozen_error(played) == pytest.approx(0.2)  # of the two axes one
    jerk, beside = scores.jerks(played, 0.1)
    np.testing.assert_allclose(beside.max(), 0.4 / 0.01)
    assert len(beside) == 4  # ticks 3..6: tick 7 has no follower
    assert jerk.mean() < beside.mean()


def test_in_sync_the_stop_is_no_jump() -> None:
    played = steady(0.0, delay=2, ticks=8, stops=True)  # rows at ticks 0 1, stop 2 3, rows 4 5, stop 6 7
    np.testing.assert_allclose(scores.jump_ratios(played), [1.0])
    assert scores.frozen_error(played) is None


def test_ended_episodes_do_not_count() -> None:
    played = steady(0.4)
    played.running[5:] = False
    assert len(scores.jump_ratios(played)) == 1
    jerk, _ = scores.jerks(played, 0.1)
    assert len(jerk) == 3
