"""Models: the maths only. One file per family; what they share lives in backbones/ and layers/.

This module imports no torch, so that the runner and the numpy models need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phyai_engine.types import ModelSpec


class Model(Protocol):
    """What the runner needs of a model. Its tensors are its own kind (torch, numpy), hence ``Any``."""

    spec: ModelSpec

    def to_device(self, array: NDArray[np.generic]) -> Any:
        """Copy a host array, dtype kept, to where the model computes."""

    def to_host(self, array: Any) -> NDArray[np.generic]:
        """Copy back, waiting until the values are there."""

    def prefix(self, inputs: Mapping[str, Any], on_phase: Callable[[str], None] = ...) -> Any:
        """All that depends on the observation and not on the step; opaque to the runner.

        :param inputs: the arrays of ``spec.inputs`` on the device, each with a leading batch dimension.
        :param on_phase: called with the name of each phase as it begins.
        """

    def velocity(self, prefix: Any, x: Any, step: int, clean: Any = None) -> Any:
        """dx/dt at ``spec.times[step]``.

        :param x: [B, H, A] float32, device. :param clean: [B, H, 1] bool, device: tokens at flow time 0 instead.
        :return: like x.
        """

    def velocity_vjp(self, prefix: Any, x: Any, step: int) -> tuple[Any, Callable[[Any], Any]]:
        """The velocity, and e -> J^T e with J = d velocity / dx; no gradient of anything else is made.

        The second is called at most once, before the next velocity: it may read what the first left behind.
        """
