"""State vectors: padding to the model's width and the text form of pi0.5."""

from __future__ import annotations

import numpy as np

from phyai_engine.transforms.normalise import Floats
from phyai_engine.types import F32

_EDGES = np.linspace(-1.0, 1.0, 257)[:-1]
_EDGES.flags.writeable = False


def pad(values: Floats, size: int) -> F32:
    """[..., n] -> [..., size] float32, zeros at the end. :raises ValueError: if n > size."""
    padded = np.zeros((*values.shape[:-1], size), dtype=np.float32)
    padded[..., : values.shape[-1]] = values
    return padded


def bins(state: Floats) -> tuple[int, ...]:
    """256 bins over [-1, 1) of a normalised state, as pi0.5 reads them; nothing is clipped.

    Below -1 gives -1 (printed as such), from 0.9921875 on gives 255.

    :param state: [n]; padded only where the checkpoint was trained so.
    """
    return tuple((np.searchsorted(_EDGES, state, side="right") - 1).tolist())
