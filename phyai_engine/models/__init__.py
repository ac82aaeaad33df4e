"""Models: the maths only. One file per family; what they share lives in backbones/ and layers/.

This module imports no torch, so that the runner and the numpy models need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from phyai_engine.types import BufferSpec, ModelSpec


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


@runtime_checkable
class Capturable(Model, Protocol):
    """A model whose phases CUDA graphs can hold: given a shape, nothing depends on values or waits for the device.

    A shape is the model's own: hashable, and ``a.holds(b)`` says that a batch of shape b can be arranged in shape a.
    """

    def captured_shapes(self, batches: Sequence[int]) -> Sequence[Any]:
        """Shapes to capture, largest first; none where the model computes without graphs.

        :param batches: sizes of the batches that will come.
        """

    def shape_of(self, rows: Sequence[Mapping[str, NDArray[Any]]]) -> Any:
        """The smallest shape of a batch. :param rows: the inputs of each row."""

    def staged(self, shape: Any) -> Mapping[str, BufferSpec]:
        """Arrays that ``encode`` reads, with their whole shapes."""

    def stage(self, shape: Any, rows: Sequence[Mapping[str, NDArray[Any]]], into: Mapping[str, NDArray[Any]]) -> None:
        """Write a batch into host arrays as ``staged`` lists them; what no row gives may keep what it held."""

    def encode(self, staged: Mapping[str, Any], on_phase: Callable[[str], None] = ...) -> Any:
        """``prefix`` from staged arrays on the device. :param on_phase: each phase that it names is a graph."""


class Work(NamedTuple):
    """Of one phase: operations, and bytes that it cannot avoid to move."""

    flop: float
    bytes: float


@runtime_checkable
class Counted(Model, Protocol):
    """A model that knows how much a request asks of it."""

    def work(self, rows: Sequence[Mapping[str, NDArray[Any]]]) -> Mapping[str, Work]:
        """Phase -> its work; ``step`` is each of the solver's. :param rows: the inputs of each row of a batch."""
