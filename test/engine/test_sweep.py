"""phyai sweep: the handoff machine on recorded latencies, checked by hand; prices, success, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from phyai_engine.cli import app
from phyai_engine.errors import ConfigError
from phyai_engine.replay.prices import Machine, Prices, load_prices
from phyai_engine.replay.record import ChunkRow, Record, TimingRow
from phyai_engine.replay.simulate import Latencies, simulate
from phyai_engine.replay.success import Configuration, Success, Trials
from phyai_engine.replay.sweep import Candidate, Grid, conclusions, sweep
from phyai_engine.replay.sweep_command import numbers
from phyai_engine.types import Schedule

DT_S = 0.02
PRICES = Prices(
    currency="EUR",
    max_busy=0.7,
    machines=(Machine(name="server", match="gpu", per_hour=3.0), Machine(name="PC", match="xeon", per_hour=0.1)),
)


def latencies(waits: Sequence[float], schedule: Schedule = Schedule.RTC) -> Latencies:
    n = len(waits)
    return Latencies(schedule, DT_S, np.array(waits), np.full(n, 0.03), np.full(n, 0.05))


def record(waits: Sequence[float], **changes: Any) -> Record:
    rows = [
        TimingRow(
            t_s=i * 0.5, epoch=1, chunk_id=i, outcome="accepted", l_observe_s=0.03, l_inference_s=0.05,
            l_critical_s=0.03 + wait,
        )
        for i, wait in enumerate(waits)
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "robot_id": "twin", "action_names": ("a",), "dt_s": DT_S, "model": "tiny, random", "placement": "process",
        "schedule": "rtc", "started": "", "host": "Xeon, 2 cores", "timings": rows,
        "chunks": [ChunkRow(t_s=0.0, epoch=1, chunk_id=0, actions=[[0.0]] * 50)],
    }  # fmt: skip
    return Record(**{**fields, **changes})


# -- simulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "margin"), [(3, -0.01), (4, 0.01), (5, 0.03)])
def test_a_fixed_delay_leaves_its_time_less_the_wait(delay: int, margin: float) -> None:
    run = simulate(latencies([0.07] * 20), horizon=50, execution_steps=25, delay_steps=delay)
    np.testing.assert_allclose(run.margin_s, margin, atol=1e-9)
    assert len(run.margin_s) == 19  # the first chunk has no deadline
    assert run.misses == (19 if margin < 0 else 0)
    assert run.requests == 20


def test_a_predicted_delay_learns_from_the_first_handoff() -> None:
    run = simulate(latencies([0.15] * 5), horizon=50, execution_steps=25)
    # At first what inference alone takes, 3 steps, and one more: 0.08 s; then the 8 steps that 0.15 s take.
    np.testing.assert_allclose(run.margin_s, [-0.07, 0.01, 0.01, 0.01], atol=1e-9)


def test_ticks_and_ages_by_hand() -> None:
    run = simulate(latencies([0.07, 0.07]), horizon=50, execution_steps=25, delay_steps=4)
    # First request at tick 0; 4 ticks held; row 0 at tick 4; second request at row 25, tick 29; answered at tick 33.
    assert (run.ticks, run.played) == (34, 30)
    # Captured 0.03 s before tick 0, replaced when tick 33 begins.
    np.testing.assert_allclose(run.age_s, [0.66 + 0.03], atol=1e-6)
    assert run.busy == pytest.approx(0.1 / (run.ticks * DT_S))


def test_without_conditioning_the_chunk_itself_is_the_deadline() -> None:
    run = simulate(latencies([0.07] * 4, Schedule.NAIVE_ASYNC), horizon=50, execution_steps=25)
    np.testing.assert_allclose(run.margin_s, 25 * DT_S - 0.07, atol=1e-9)


def test_a_waiting_robot_has_no_deadline_and_plays_less() -> None:
    sync = simulate(latencies([0.07] * 4, Schedule.SYNC), horizon=50, execution_steps=25)
    rtc = simulate(latencies([0.07] * 4), horizon=50, execution_steps=25)
    assert len(sync.margin_s) == 0
    assert sync.played_fraction < rtc.played_fraction <= 1.0


def test_a_stall_empties_the_chunk_and_the_robot_holds() -> None:
    run = simulate(latencies([0.01, 0.3, 0.01, 0.01]), horizon=8, execution_steps=4, delay_steps=1)
    np.testing.assert_allclose(run.margin_s, [0.02 - 0.3, 0.01, 0.01], atol=1e-9)
    assert run.misses == 1
    # Tick 0 waits for the first chunk; 4 of the 15 ticks until the late one have a row left.
    assert run.ticks - run.played == 1 + 15 - 4


def test_a_delay_beyond_the_horizon_is_refused() -> None:
    with pytest.raises(ConfigError, match="delay is out of range, got 51"):
        simulate(latencies([0.1]), horizon=50, execution_steps=25, delay_steps=51)
    with pytest.raises(ConfigError, match="execution horizon is out of range, got 51"):
        simulate(latencies([0.1]), horizon=50, execution_steps=51)


def test_latencies_of_a_record_are_its_accepted_chunks() -> None:
    rows = [*record([0.07, 0.09]).timings, TimingRow(t_s=9.0, epoch=1, chunk_id=9, outcome="cancelled")]
    found = Latencies.of(record([], timings=rows))
    np.testing.assert_allclose(found.wait_s, [0.07, 0.09])
    with pytest.raises(ConfigError, match="0 answers, none of them accepted"):
        Latencies.of(record([]))
    with pytest.raises(ConfigError, match="unknown schedule, got dance"):
        Latencies.of(record([0.1], schedule="dance"))


# -- table -------------------------------------------------------------------------------------------------------------


def test_rows_say_what_is_proven_and_what_is_not() -> None:
    grid = Grid(execution_steps=(25,), delay_steps=(3, 5), eps=0.01)
    few = sweep([Candidate("few", record([0.07] * 60), 50)], grid, PRICES)
    assert [(row.delay_steps, row.keeps) for row in few.rows] == [(5, "unproven"), (3, "no")]
    assert any("a bound of 0.01 takes 299 handoffs without a miss" in sentence for sentence in conclusions(few))
    many = sweep([Candidate("many", record([0.07] * 320), 50)], grid, PRICES)
    assert [(row.delay_steps, row.keeps) for row in many.rows] == [(5, "yes"), (3, "no")]
    assert many.best is not None and many.best.delay_steps == 5


def test_a_sync_run_has_no_deadline_to_keep() -> None:
    found = sweep([Candidate("x", record([0.07] * 9, schedule="sync"), 50)], Grid(), PRICES)
    assert {row.keeps for row in found.rows} == {"no deadline"}
    assert found.best is None


def test_default_horizons_are_quarters_and_impossible_ones_are_counted() -> None:
    found = sweep([Candidate("x", record([0.07] * 9), 50)], Grid(delay_steps=(4, 20)), PRICES)
    assert sorted((row.execution_steps, row.delay_steps) for row in found.rows) == [(12, 4), (25, 4), (25, 20), (37, 4)]
    assert found.skipped == 2  # 20 > 12, and 37 > 50 - 20
    with pytest.raises(ConfigError, match="nothing to try"):
        sweep([Candidate("x", record([0.07]), 50)], Grid(execution_steps=(99,)), PRICES)


def test_a_server_is_shared_and_a_budget_leaves_out_what_is_too_dear() -> None:
    remote = record([0.07] * 400, placement="remote", host="gpu server")
    local = record([0.07] * 400)
    grid = Grid(execution_steps=(25,), delay_steps=(5,), eps=0.01)
    runs = [Candidate("far", remote, 50), Candidate("near", local, 50)]
    by_name = {row.run: row for row in sweep(runs, grid, PRICES).rows}
    # 0.05 s of every 25 steps of 0.02 s: a tenth; a server may compute 0.7 of the time.
    assert by_name["far"].busy == pytest.approx(0.1, rel=0.02)
    assert by_name["far"].robots in (6, 7)
    assert by_name["far"].cost == pytest.approx(3.0 / by_name["far"].robots)
    assert (by_name["near"].robots, by_name["near"].cost, by_name["near"].machine) == (1, 0.1, "PC")
    cheap = sweep(runs, Grid(execution_steps=(25,), delay_steps=(5,), eps=0.01, budget=0.2), PRICES)
    assert cheap.best is not None and cheap.best.run == "near"
    assert [row.affordable for row in cheap.rows] == [True, False]
    nobody = sweep(runs, Grid(execution_steps=(25,), delay_steps=(5,), eps=0.01, budget=0.01), PRICES)
    assert nobody.best is None
    assert "No configuration keeps its deadline at eps 0.01 within 0.01 EUR" in conclusions(nobody)[0]


def test_a_run_without_a_price_is_out_of_any_budget() -> None:
    found = sweep([Candidate("x", record([0.01] * 9, host="abacus"), 50)], Grid(budget=99.0, eps=0.5), PRICES)
    assert found.best is None
    assert any("No price matches x" in sentence for sentence in conclusions(found))


def test_success_goes_before_cost() -> None:
    trials = Success(trials=(
        Trials(run="big", success=0.9, n=50), Trials(run="big", success=0.8, n=40, execution_steps=12),
        Trials(run="small", success=0.5, n=50),
    ))  # fmt: skip
    runs = [
        Candidate("big", record([0.07] * 9, host="gpu"), 50),
        Candidate("small", record([0.07] * 9), 50),
    ]
    found = sweep(runs, Grid(execution_steps=(12, 25), delay_steps=(5,), eps=0.5), PRICES, trials)
    assert [(row.run, row.execution_steps, row.success) for row in found.rows] == [
        ("big", 25, 0.9), ("big", 12, 0.8), ("small", 12, 0.5), ("small", 25, 0.5),
    ]  # fmt: skip


def test_a_rate_counts_only_under_as_much_delay_and_the_nearest_one_does() -> None:
    def rate(success: float, delay: int | None, *, execution: int | None = 0, schedule: str = "rtc") -> Trials:
        steps = {"execution_steps": execution, "delay_steps": delay}
        return Trials(run="tiny", success=success, n=9, schedule=schedule, **steps)

    def of(*rates: Trials, execution_steps: int = 25, delay_steps: int = 5) -> float | None:
        wanted = Configuration(("fast", "TINY, random"), "rtc", 50, execution_steps, delay_steps)
        found = Success(rates).of(wanted)
        return None if found is None else found.success

    assert of(rate(0.9, 4)) is None
    assert of(rate(0.9, 4), rate(0.8, 5), rate(0.7, 9)) == 0.8
    assert of(rate(0.7, 9), rate(0.8, 5), delay_steps=6) == 0.7
    assert of(rate(0.6, None), rate(0.7, 9)) == 0.7
    assert of(rate(0.6, 9, execution=None), rate(0.7, 9)) == 0.7
    assert of(rate(0.7, 9), execution_steps=12) is None
    assert of(rate(0.7, 9, schedule="sync")) is None
    assert Latencies.of(record([0.07] * 9)).delay_steps == 5  # 30 ms before it, 20 ms a tick


def test_what_was_not_evaluated_is_said() -> None:
    rates = Success((Trials(run="fast", success=0.9, n=9, delay_steps=4), Trials(run="other", success=0.9, n=9)))
    found = sweep([Candidate("fast", record([0.07] * 9), 50)], Grid(execution_steps=(25,), eps=0.5), PRICES, rates)
    assert found.rows[0].success is None
    said = conclusions(found)
    assert "No success rate under the delay of fast with s = 25 (100 ms): evaluate with that --delay-ms." in said
    assert "Success rates of other match no run: give NAME=FOLDER." in said


def test_the_shipped_prices_are_placeholders_and_fit() -> None:
    assert load_prices().machine("x86", "a CPU") is not None
    text = (Path(__file__).parents[2] / "config" / "prices.yaml").read_text()
    assert "PLACEHOLDERS" in text


# -- command -----------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["sweep", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_the_command(tmp_path: Path) -> None:
    path, out = tmp_path / "run.json", tmp_path / "sweep.json"
    record([0.07] * 30).save(path)
    code, said, _ = run(f"fast={path}", "--steps", "25", "--delay", "3, 5,predicted", "--eps", "0.2", "-o", out)
    assert code == 0
    assert "Best at eps 0.2: fast with s = 25, d 5" in said
    found = json.loads(out.read_text())
    assert [row["delay_steps"] for row in found["rows"]] == [5, None, 3]
    rates = tmp_path / "rates.yaml"
    rates.write_text("trials: [{run: fast, success: 0.75, n: 40}]")
    assert "75.0 % of 40" in run(f"fast={path}", "--steps", "25", "--eps", "0.2", "--success", rates)[1]
    assert run(path, "--delay", "3", "--steps", "25")[0] == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "many"], "got 'many', wanted whole numbers with commas between, at --steps"),
        (["--delay", "x"], "or predicted, at --delay"),
        (["--eps", "2"], "eps is out of range"),
        (["--prices", "none.yaml"], "cannot read the file"),
        (["--out", "none/x.json"], "no such folder"),
        (["--success", "none.yaml"], "cannot read the file"),
        (["--success", "x=none"], "not an evaluation, got none"),
    ],
)
def test_wrong_arguments_end_with_2(tmp_path: Path, more: list[str], message: str) -> None:
    path = tmp_path / "run.json"
    record([0.07] * 3).save(path)
    code, _, error = run(path, *more)
    assert code == 2
    assert message in error


def test_a_run_must_say_its_horizon(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record([0.07] * 3, chunks=()).save(path)
    code, _, error = run(path)
    assert code == 2 and "does not say its horizon" in error
    assert run(path, "--horizon", 50, "--eps", 0.9)[0] == 0


def test_numbers() -> None:
    assert numbers("", "--steps") == []
    assert numbers("10, 15", "--steps") == [10, 15]
    assert numbers("predicted,5", "--delay", also="predicted") == [None, 5]
