"""A bag of the simulated robot, recorded by the policy node, replayed: by a real node in real time, by the engine alone
step by step, with planted sensor faults, and against gates. Results and reports stay in out/prove/replay.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import rclpy
from evidence import conclude, fake_model, options
from rclpy.node import Node

from phyai_engine.replay import record as records
from phyai_engine.replay.summary import summary
from phyai_engine.replay.verdict import verdict
from phyai_ros.processes import Processes

OUT = Path("out/prove/replay")
BROWSER = Path(__file__).resolve().parents[1] / "engine" / "browser.py"
ROBOT, SIM, POLICY = "arm7", "sim_robot", "policy_node"
LATENCY_MS = 60.0
FAULTY_S = 16.0
Row = tuple[str, str, bool | None]


def stalls() -> str:
    """400 ms of silence every 5 s, for longer than any run here; the clock starts with the simulated robot."""
    return "[" + ", ".join(f"{5.0 * i}, {5.0 * i + 0.4}" for i in range(1, 60)) + "]"


# planted fault -> parameters of the simulated robot, and how the report must name it
PLANTED: dict[str, tuple[dict[str, object], str]] = {
    "wrist 80 ms late": ({"delay_s.wrist": 0.08}, "wrist late"),
    "front stalls 400 ms every 5 s": ({"dropout_s.front": stalls()}, "front stall"),
    "front frozen": ({"freeze.front": "frame"}, "front frozen"),
}


def record(name: str, seconds: float, model: str, faults: Mapping[str, object]) -> Path:
    """The simulated robot driven by the policy node, which records."""
    folder = OUT / "bags" / name
    rclpy.init()
    node = Node("observer")
    processes = Processes(node, OUT)
    try:
        processes.start(SIM, "phyai_ros.sim_node", robot=ROBOT, **faults)
        processes.start(POLICY, "phyai_ros.policy_node", robot=ROBOT, model=model, record=folder.absolute())
        processes.transition(POLICY, "configure")
        processes.transition(POLICY, "activate")
        processes.spin(seconds)
        processes.transition(POLICY, "deactivate")
    finally:
        processes.stop()
        node.destroy_node()
        rclpy.try_shutdown()
    return folder


def replay(bag: Path, name: str, model: str, *more: str, node: bool = False) -> tuple[int, Path]:
    """Exit code and results of one replay, by a node or by the engine alone."""
    out = OUT / name
    program = ["-m", "phyai_ros.replay_node"] if node else ["-c", "from phyai_engine.cli import main; main()", "replay"]
    command = [sys.executable, *program, str(bag), "--robot", ROBOT, "--model", model, "--out", str(out), *more]
    with (OUT / f"{name}.log").open("wb") as log:
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode, out


def by_the_node(bag: Path, model: str) -> list[Row]:
    """Must-show: real time, a real node; the report in a browser."""
    code, out = replay(bag, "node", model, "--gate", "aborts<=0", node=True)
    run = records.load(out / "record.json")
    figures = summary(run)
    margin, actions = figures["margins"]["m_ctrl_s"], figures["ticks"]["action"]
    browse = [sys.executable, str(BROWSER), str(out / "report.html")]
    page = subprocess.run(browse, capture_output=True, text=True, check=False)
    told = next(event.text for event in run.events if "messages played" in event.text)
    return [
        ("node, real-time: exit code; bag s", f"{code}; {run.survey.duration_s:.1f}", code == 0),
        ("node: handoffs; actions", f"{figures['handoffs']}; {actions}", figures["handoffs"] > 0),
        ("node: margin ms", f"p50 {margin['p50'] * 1e3:.1f}, p01 {margin['p01'] * 1e3:.1f}, n {margin['n']}", None),
        ("node: misses", f"{margin['misses']} of {margin['n']}", None),
        ("node: refusals", ", ".join(f"{k} {n}" for k, n in figures["refusals"].items()) or "none", None),
        ("node: publication", told, None),
        ("report in headless Chromium", page.stdout.strip().rpartition(": ")[2], page.returncode == 0),
    ]


def step_by_step(bag: Path, model: str) -> list[Row]:
    """Must-show: the same hash three times, and no fault named in a clean bag."""
    runs = []
    for i in range(3):
        _, out = replay(bag, f"step-{i + 1}", model, "--mode", "step", "--latency-ms", str(LATENCY_MS))
        runs.append(records.load(out / "record.json"))
    hashes = {run.chunk_hash for run in runs}
    alike = f"{len(hashes)} different, {len(runs[0].chunks)} chunks, {min(hashes)[:16]}"
    named = ", ".join(f"{fault.where} {fault.kind}" for fault in runs[0].survey.faults) or "none"
    return [
        ("step mode, three times: chunk hashes", alike, len(hashes) == 1 and bool(runs[0].chunks)),
        ("clean bag: faults named", named, not runs[0].survey.faults),
    ]


def recorded_again(bag: Path) -> list[Row]:
    """Must-show: the recorded requests give the recorded actions again, with the same engine and seeds."""
    command = [sys.executable, "-c", "from phyai_engine.cli import main; main()", "replay", str(bag), "--recorded"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    said = next((line for line in ran.stdout.splitlines() if "chunks have the same actions" in line), ran.stderr[-200:])
    return [("recorded requests asked again", said, ran.returncode == 0)]


def planted(model: str) -> list[Row]:
    """Must-show: every planted fault is named in the first line, and no other."""
    rows: list[Row] = []
    for name, (faults, wanted) in PLANTED.items():
        bag = record(wanted.replace(" ", "-"), FAULTY_S, model, faults)
        _, out = replay(bag, bag.name, model, "--mode", "step", "--latency-ms", str(LATENCY_MS))
        run = records.load(out / "record.json")
        first, *_ = verdict(run)
        kinds = {f"{fault.where} {fault.kind}" for fault in run.survey.faults}
        rows.append((f"planted: {name}", first, wanted in first and kinds == {wanted}))
    return rows


def gates(bag: Path, model: str) -> list[Row]:
    """Must-show: exit codes both ways."""
    rows: list[Row] = []
    for text, wanted in (
        ("p50_margin_ms>=5,handoffs>=10", 0),
        ("p99_margin_ms>=100000", 1),
        ("miss_rate<=1e-3,p99_inference_ms<=1", 1),
        ("p98_margin_ms>=5", 2),
    ):
        code, _ = replay(bag, "gate", model, "--mode", "as-fast-as-possible", "--seconds", "10", "--gate", text)
        rows.append((f"gate {text}: exit code, wanted {wanted}", str(code), code == wanted))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the clean bag")
    chosen = options(parser)
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "bags").mkdir(parents=True)
    model = fake_model(latency_ms=LATENCY_MS, horizon=32)
    bag = record("clean", chosen.seconds, model, {})
    rows = [
        *by_the_node(bag, model),
        *step_by_step(bag, model),
        *recorded_again(bag),
        *planted(model),
        *gates(bag, model),
    ]
    return conclude(f"replay of a {chosen.seconds:.0f} s bag, model of {LATENCY_MS:.0f} ms", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
