"""What real-time chunking is worth at every delay: every method of ``phyai rtc-study`` at full n, and what it promises.

Minutes on two cores; the policy is trained first where the cache has none. ``--out`` keeps every figure, ``--plot``
the picture of the README.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evidence import conclude, options, show
from rich.console import Console

from phyai_engine.rtc_study.command import StudyOptions, run_study
from phyai_engine.rtc_study.figure import svg
from phyai_engine.rtc_study.result import Study, claims
from phyai_engine.rtc_study.table import COLUMNS, row


def shown(study: Study) -> list[tuple[str, ...]]:
    """No delay and the largest one of every method; ``--out`` has the others."""
    ends = (0, max(study.delays()))
    return [row(cell) for cell in study.cells if cell.delay_steps in ends]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=512, help="of each method at each delay")
    parser.add_argument("--seed", type=int, default=1, help="of the episodes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = options(parser)
    study = run_study(StudyOptions(episodes=chosen.episodes, seed=chosen.seed), Console(stderr=True))
    if chosen.out is not None:
        study.save(chosen.out)
    if chosen.plot is not None:
        chosen.plot.write_text(svg(study), encoding="utf-8")
    title = f"rtc-study: {chosen.episodes} episodes per row; training {study.train_s} s, play {study.play_s} s"
    show(title, COLUMNS, shown(study), log=chosen.log)
    return conclude("rtc-study: what is promised", claims(study), log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
