"""The file of a calibration: the largest activation that each coded matrix was seen to multiply. Needs no torch.

Kept are the activations as measured, not scales: what margin they get is the coder's business. The file names the
weights that it was measured with, since scales of other weights give wrong actions without an error.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml
from msgspec import Struct

from phyai_engine.config import convert, read_yaml
from phyai_engine.errors import ConfigError

FILE = "activation_scales.yaml"
"""Its name in a checkpoint's folder."""


class ActivationScales(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One calibration.

    :param made: by what, from which observations, and how many. :param weights: digest of the matrices that were coded
        (coding.weights_digest). :param largest: matrix -> largest |activation| that it multiplied.
    """

    made: str
    weights: str
    largest: dict[str, float]


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
    return convert(read_yaml(path), ActivationScales, where=str(path))


def save_scales(scales: ActivationScales, path: Path) -> None:
    """:raises ConfigError: it cannot be written."""
    text = yaml.safe_dump(msgspec.to_builtins(scales), sort_keys=False, width=120)
    try:
        path.write_text("# Written by `phyai calibrate`, read where `quant` is on.\n" + text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the scales: {error.strerror}", where=path, do="Give --out.") from None
