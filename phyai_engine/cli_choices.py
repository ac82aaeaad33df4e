"""Choices that several commands of ``phyai`` offer."""

from __future__ import annotations

from enum import Enum


class Device(str, Enum):
    """Where a model computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(str, Enum):
    """Of a model's matrices."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class When(str, Enum):
    """Of the next inference: the schedules of the node."""

    SYNC = "sync"
    NAIVE_ASYNC = "naive_async"
    RTC = "rtc"
