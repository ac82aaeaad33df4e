"""The file of a calibration: what each matrix was seen to multiply. Needs no torch.

Kept is what was measured, not scales: what margin it gets is the coder's business. The file names the weights that it
was measured with, since scales of other weights give wrong actions without an error.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phyai_engine.errors import ConfigError
from phyai_engine.types import F32

FILE = "activation_scales.npz"
"""Its name in a checkpoint's folder."""

_MADE, _WEIGHTS, _CENTRE, _LARGEST = "made", "weights", ".centre", ".largest"


class Seen(NamedTuple):
    """The operand of one matrix, over all tokens.

    :param centre: [K] float32, the mean of each input. :param largest: |x - centre| of all inputs.
    """

    centre: F32
    largest: float


@dataclass(frozen=True, slots=True, eq=False)
class ActivationScales:
    """One calibration.

    :param made: from which observations, and how many. :param weights: digest of the matrices that can be coded
        (coding.weights_digest). :param seen: matrix -> operand.
    """

    made: str
    weights: str
    seen: Mapping[str, Seen]


def load_scales(path: Path, *, checkpoint: object) -> ActivationScales:
    """:param checkpoint: for the message, what to calibrate.

    :raises ConfigError: no such file, or not one.
    """
    if not path.is_file():
        raise ConfigError(
            "no activation scales",
            got=f"quant without {path}",
            where="options.quant_scales",
            do=f"Run `phyai calibrate {checkpoint}`, or write `quant: none`.",
        )
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            names = [key.removesuffix(_CENTRE) for key in arrays if key.endswith(_CENTRE)]
            seen = {n: Seen(arrays[n + _CENTRE].astype(np.float32), float(arrays[n + _LARGEST])) for n in names}
            return ActivationScales(str(arrays[_MADE]), str(arrays[_WEIGHTS]), seen)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        text = f"not a file of activation scales: {error}"
        raise ConfigError(text, where=path, do=f"Run `phyai calibrate {checkpoint}` again.") from None


def save_scales(scales: ActivationScales, path: Path) -> None:
    """:raises ConfigError: it cannot be written."""
    arrays: dict[str, Any] = {_MADE: np.array(scales.made), _WEIGHTS: np.array(scales.weights)}
    for name, seen in scales.seen.items():
        arrays |= {name + _CENTRE: seen.centre, name + _LARGEST: np.float32(seen.largest)}
    try:
        with path.open("wb") as stream:  # numpy would add its own ending to a name
            np.savez(stream, **arrays)
    except OSError as error:
        raise ConfigError(f"cannot write the scales: {error.strerror}", where=path, do="Give --out.") from None
