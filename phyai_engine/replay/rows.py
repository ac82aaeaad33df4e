"""Messages of this package -> rows of a record. Any object with a message's fields will do: rclpy's, or a bag's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image as Picture

from phyai_engine.replay.record import OUTCOMES, FrameRow, StepRow, TimingRow
from phyai_engine.types import U8, CommandKind, Refusal

THUMBNAIL = (240, 180)
"""Largest width and height of a kept frame."""


def step_row(t_s: float, message: Any) -> StepRow:
    """ActionStep.msg."""
    return StepRow(
        t_s=t_s,
        kind=CommandKind(message.kind).name.lower(),  # type: ignore[arg-type]
        values=[float(value) for value in message.values],
        tick=int(message.tick),
        epoch=int(message.epoch),
        chunk_id=int(message.chunk_id),
        step=int(message.step),
    )


def timing_row(t_s: float, message: Any) -> TimingRow:
    """ChunkTiming.msg."""
    outcome = OUTCOMES[message.outcome - 1]  # OUTCOME_* count from 1 in the same order
    return TimingRow.of(t_s, message, outcome=outcome, refusal=Refusal(message.refusal).name.lower())


def frame_row(t_s: float, camera: str, image: U8) -> FrameRow:
    """A picture small enough to keep. :param image: [h, w, 3] uint8 RGB."""
    picture = Picture.fromarray(np.ascontiguousarray(image))
    picture.thumbnail(THUMBNAIL)
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=80)
    return FrameRow(t_s=t_s, camera=camera, jpeg=jpeg.getvalue())
