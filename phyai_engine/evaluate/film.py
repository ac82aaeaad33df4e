"""What the cameras saw in one episode, as an animated GIF: every observation, cameras side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from phyai_engine.types import U8

HEIGHT = 160  # px
FRAME_MS = 200


def save_film(frames: Sequence[Mapping[str, U8]], path: Path) -> None:
    """Write it. :param frames: camera -> [h, w, 3] uint8, of each observation; none: no file."""
    pictures = [_picture(seen) for seen in frames if seen]
    if not pictures:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=FRAME_MS, loop=0)


def _picture(seen: Mapping[str, U8]) -> Image.Image:
    small = [Image.fromarray(image) for image in seen.values()]
    small = [image.resize((max(1, image.width * HEIGHT // image.height), HEIGHT)) for image in small]
    return Image.fromarray(np.hstack([np.asarray(image) for image in small])).quantize(64)
