"""Faults of the simulated robot's streams as dynamic ROS parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from phyai_engine.errors import ConfigError
from phyai_engine.sim.faults import FaultyStream, Freeze, StreamFaults


class FaultParameters:
    """Dynamic parameters ``delay_s.S``, ``drop.S``, ``freeze.S`` and ``dropout_s.S`` of each stream S.

    A change takes effect with the stream's next sample; a value out of range is refused with its reason.
    """

    def __init__(self, node: Node, streams: Mapping[str, FaultyStream[Any]]) -> None:
        self._node, self._streams = node, streams
        for name in streams:
            self._declare(name)
        self._apply([])
        node.add_on_set_parameters_callback(self._check)
        node.add_post_set_parameters_callback(self._apply)

    def _declare(self, stream: str) -> None:
        declare = self._node.declare_parameter

        def within(upper: float, text: str) -> ParameterDescriptor:
            bounds = [FloatingPointRange(from_value=0.0, to_value=upper)]
            return ParameterDescriptor(description=text, floating_point_range=bounds)

        declare(f"delay_s.{stream}", 0.0, within(10.0, "time between stamp and publication [s]"))
        declare(f"drop.{stream}", 0.0, within(1.0, "probability that a message is lost"))
        words = ", ".join(f.value for f in Freeze)
        declare(f"freeze.{stream}", Freeze.NONE.value, ParameterDescriptor(description=f"one of {words}"))
        text = "begin, end, begin, end, ...: windows since the node's start in which everything is lost [s]"
        declare(f"dropout_s.{stream}", Parameter.Type.DOUBLE_ARRAY, ParameterDescriptor(description=text))

    def _faults(self, stream: str, changes: dict[str, Any]) -> StreamFaults:
        def value(field: str, default: Any) -> Any:
            name = f"{field}.{stream}"
            if name in changes:
                return changes[name]
            current = self._node.get_parameter_or(name)
            return default if current.value is None else current.value

        freeze, windows = value("freeze", Freeze.NONE.value), list(value("dropout_s", []))
        if freeze not in {f.value for f in Freeze}:
            raise ConfigError("unknown freeze", got=freeze, wanted=f"one of {', '.join(f.value for f in Freeze)}")
        if len(windows) % 2:
            raise ConfigError("dropout_s holds an odd number of values", got=windows, wanted="begin, end, ...")
        return StreamFaults(
            delay_s=float(value("delay_s", 0.0)),
            drop=float(value("drop", 0.0)),
            freeze=Freeze(freeze),
            dropouts=tuple(zip(windows[::2], windows[1::2], strict=True)),
        )

    def _check(self, parameters: list[Parameter]) -> SetParametersResult:
        changes = {p.name: p.value for p in parameters}
        try:
            for stream in self._streams:
                self._faults(stream, changes)
        except ConfigError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _apply(self, parameters: list[Parameter]) -> None:
        for name, stream in self._streams.items():
            faults = self._faults(name, {})
            if faults != stream.faults:
                self._node.get_logger().info(f"{name}: {faults}")
                stream.faults = faults
