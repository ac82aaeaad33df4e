"""The shipped policy's recipe as one command, timed, and what its policy reaches. A GPU, EGL and the simulator; no ROS.

`phyai train demo` with its defaults, then `phyai eval` of what it made. Both go on where they were cut short: with
``--limit-s`` a call ends in time and the next one continues. The wall time is that of all calls, lost work included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import checkout
from evidence import conclude, options

from phyai_engine.config import child_environment
from phyai_engine.evaluate.provenance import checkpoint_sha256
from phyai_engine.evaluate.scores import summarise

Row = tuple[str, str, bool | None]
TRAIN_MAX_S = 20 * 60
SUCCESS_MIN = 0.9
UNFINISHED = 3
_PHYAI = "import checkout; from phyai_engine.cli import main; main()"


class Wall:
    """Seconds that each command took so far, over all calls. :param left_s: of this one."""

    def __init__(self, folder: Path, left_s: float) -> None:
        self._file = folder / "seconds.json"
        self._end = time.monotonic() + left_s
        self.seconds: dict[str, float] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def run(self, *command: str) -> bool:
        """`phyai COMMAND` for as long as this call has left. False where it was cut short.

        :raises CalledProcessError: it failed.
        """
        began = time.monotonic()
        environment = child_environment(PYTHONPATH=str(checkout.ROOT / "test" / "prove"), MUJOCO_GL="egl")
        try:
            subprocess.run(
                [sys.executable, "-c", _PHYAI, *command],
                check=True,
                env=environment,
                timeout=max(1.0, self._end - began),
            )
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.seconds[command[0]] = self.seconds.get(command[0], 0.0) + time.monotonic() - began
            self._file.write_text(json.dumps(self.seconds))
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu-train"), help="of both; delete it to begin anew")
    parser.add_argument("--episodes", type=int, default=50, help="of each task")
    parser.add_argument(
        "--smoke", action="store_true", help="a recipe of seconds that learns nothing: do the parts fit"
    )
    parser.add_argument("--limit-s", type=float, default=3600.0, help="this call ends then")
    chosen = options(parser)
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    policy, wall = out / "policy", Wall(out, chosen.limit_s)
    done = out / "trained"
    if not done.exists():
        smoke = ["--smoke"] if chosen.smoke else []
        if not wall.run("train", "demo", *smoke, "--out", str(policy), "--work", str(out / "work")):
            print(f"cut short after {wall.seconds['train']:.0f} s of training: call again", file=sys.stderr)
            return UNFINISHED
        done.touch()
    if not wall.run("eval", str(policy), "-n", str(chosen.episodes), "--seed", "1", "--out", str(out / "eval")):
        print("cut short in the evaluation: call again", file=sys.stderr)
        return UNFINISHED
    found = summarise(out / "eval")
    of_tasks = "; ".join(f"{score.task} {score.successes}/{score.n}" for score in found.tasks)
    train_s = wall.seconds["train"]
    rows: list[Row] = [
        ("`phyai train demo`, its check included (<= 20 min)", f"{train_s:.0f} s", train_s <= TRAIN_MAX_S),
        ("SHA-256 of model.safetensors", checkpoint_sha256(str(policy)), None),
        ("success, sync, no delay", f"{found.all.success}, n {found.all.n}; {wall.seconds['eval']:.0f} s", None),
        ("mean over the tasks (>= 90 %)", f"{found.task_mean:.1%}: {of_tasks}", found.task_mean >= SUCCESS_MIN),
    ]
    recipe = "a smoke recipe" if chosen.smoke else "the default recipe"
    return conclude(f"training: {recipe} as one command", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
