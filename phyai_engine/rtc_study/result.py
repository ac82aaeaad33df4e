"""What one ``phyai rtc-study`` found, as its JSON file holds it, and what can be read off it."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from phyai_engine.rtc_study.net import Recipe
from phyai_engine.rtc_study.sampling import GUIDANCE, Method
from phyai_engine.rtc_study.scores import Cell
from phyai_engine.whole_files import write_json

VERSION = 1
Claim = tuple[str, str, bool]
KEPT_MIN = 0.95  # of its success without delay
RATIO_SEAMLESS, RATIO_JUMPS = 1.5, 3.0


class Study(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All cells of one study.

    :param seed: of the episodes. :param denoising_steps: N; beta = N. :param host: in words.
    :param train_s: seconds of training, 0 with a net from the cache. :param play_s: of all cells.
    """

    version: int = VERSION
    recipe: Recipe
    horizon: int
    denoising_steps: int
    seed: int
    host: str
    train_s: float
    play_s: float
    cells: tuple[Cell, ...]

    def cell(self, method: Method, delay: int) -> Cell | None:
        """None where it was not played."""
        return next((c for c in self.cells if (c.method, c.delay_steps) == (method.value, delay)), None)

    def delays(self) -> list[int]:
        return sorted({cell.delay_steps for cell in self.cells})

    def methods(self) -> list[Method]:
        """Those played, in their own order."""
        played = {cell.method for cell in self.cells}
        return [method for method in Method if method.value in played]

    def best(self, delay: int) -> Cell | None:
        """The guided or trained method with the most successes; of equals the one with the smaller median jump."""
        cells = [c for m in GUIDANCE if (c := self.cell(m, delay)) is not None]
        return max(cells, key=lambda c: (c.successes, -(c.jump_ratio.p50 if c.jump_ratio else 0.0)), default=None)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_json(path, self)


def claims(study: Study) -> list[Claim]:
    """(what, figures, held) of what real-time chunking promises, at the largest delay; only what its cells can tell."""
    last = max(study.delays())
    best = study.best(last)
    none = None if best is None else study.cell(Method(best.method), 0)
    rows: list[Claim] = []
    if best is not None and none is not None and last > 0:
        kept = best.successes / none.successes if none.successes else 0.0
        figure = f"{best.method}: {percent(best)} at d = {last}, {percent(none)} at d = 0: {kept:.1%} kept"
        rows.append((f"the best RTC mode keeps {KEPT_MIN:.0%} of its success", figure, kept >= KEPT_MIN))
    for method in (Method.NAIVE_ASYNC, Method.TEMPORAL_ENSEMBLE):
        other = study.cell(method, last)
        if best is not None and other is not None:
            figure = f"{percent(other)} against {percent(best)}"
            lost = other.success.high < best.success.low
            rows.append((f"{method.value} loses at d = {last}, intervals apart", figure, lost))
    if best is not None and best.jump_ratio is not None:
        ratio = best.jump_ratio.p50
        what = f"{best.method}: median jump ratio at d = {last} <= {RATIO_SEAMLESS}"
        rows.append((what, f"{ratio:.2f}", ratio <= RATIO_SEAMLESS))
    naive = study.cell(Method.NAIVE_ASYNC, last)
    if naive is not None and naive.jump_ratio is not None:
        ratio = naive.jump_ratio.p50
        rows.append(
            (f"naive_async: median jump ratio at d = {last} >= {RATIO_JUMPS:g}", f"{ratio:.2f}", ratio >= RATIO_JUMPS)
        )
    return rows


def percent(cell: Cell) -> str:
    """Success in words: ``97.9 % [96.2, 98.8]``."""
    return str(cell.success)
