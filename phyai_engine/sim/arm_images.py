"""Camera images of the simulated arm, drawn with numpy: cheap, deterministic, and moving with every joint."""

from __future__ import annotations

import numpy as np

from phyai_engine.errors import ConfigError
from phyai_engine.types import F64, U8

LINK_M = 0.16  # length of each link
SAMPLES = 40  # points drawn per link
BRUSH_PX = 3  # half width of a link
FLOOR_PX_PER_M = 220.0
LINK_COLOURS = np.array([(220, 60, 50), (240, 150, 40)], dtype=np.uint8)
TOOL_COLOUR = np.array((30, 200, 220), dtype=np.uint8)


def link_points(position: F64) -> F64:
    """Ends of the links of a chain whose joints turn about z and y by turns: [J+1, 3] m, base first."""
    points = np.zeros((position.size + 1, 3))
    turn = np.eye(3)
    for i, angle in enumerate(position):
        c, s = np.cos(angle), np.sin(angle)
        about_z = np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
        about_y = np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
        turn = turn @ (about_z if i % 2 == 0 else about_y)
        points[i + 1] = points[i] + turn @ np.array([0.0, 0.0, LINK_M])
    return points


class ArmImages:
    """Two kinds of view: the first camera sees the arm from the front, the others look down from the tool.

    :param cameras: names in the robot file's order. :param width: pixels; ``height`` likewise.
    """

    def __init__(self, cameras: tuple[str, ...], width: int, height: int) -> None:
        self._cameras, self._width, self._height = cameras, width, height
        rows, columns = np.mgrid[0:height, 0:width]
        shade = (60 + 120 * rows / max(height - 1, 1)).astype(np.uint8)
        self._backdrop = np.stack([shade, shade, np.full_like(shade, 110)], axis=-1)
        rows, columns = np.mgrid[0 : 2 * height, 0 : 2 * width]
        check = ((rows // 24 + columns // 24) % 2).astype(np.uint8)
        self._floor = np.stack(
            [90 + 80 * check, (60 + 120 * rows / (2 * height)), (60 + 120 * columns / (2 * width))], axis=-1
        ).astype(np.uint8)
        steps = np.arange(-BRUSH_PX, BRUSH_PX + 1)
        self._brush = np.array([(r, c) for r in steps for c in steps if r * r + c * c <= BRUSH_PX * BRUSH_PX + 1])

    def draw(self, camera: str, position: F64) -> U8:
        """[h, w, 3] uint8 RGB of joints at ``position`` ([J] rad).

        :raises ConfigError: unknown camera.
        """
        if camera not in self._cameras:
            raise ConfigError("unknown camera", got=camera, wanted=f"one of {', '.join(self._cameras)}")
        points = link_points(position)
        return self._front(points) if camera == self._cameras[0] else self._tool(points, float(position[-1]))

    def _front(self, points: F64) -> U8:
        image = self._backdrop.copy()
        reach = LINK_M * (len(points) - 1)
        scale = 0.8 * self._height / reach
        # Seen along x, with a little of x as depth so that no joint moves unseen.
        columns = self._width / 2 + scale * (points[:, 1] + 0.35 * points[:, 0])
        rows = 0.75 * self._height - scale * (points[:, 2] - 0.2 * points[:, 0])
        pixels = np.stack([rows, columns], axis=-1)
        for i in range(len(points) - 1):
            self._line(image, pixels[i], pixels[i + 1], LINK_COLOURS[i % 2])
        self._line(image, pixels[-1], pixels[-1], TOOL_COLOUR)
        return image

    def _tool(self, points: F64, last_joint: float) -> U8:
        shift = (points[-1, :2] * FLOOR_PX_PER_M).astype(int)
        row, column = int(shift[0]) % self._height, int(shift[1]) % self._width
        image = self._floor[row : row + self._height, column : column + self._width].copy()
        centre = np.array([self._height / 2, self._width / 2])
        length = (0.12 + 0.15 * abs(float(points[-1, 2]))) * self._height
        finger = length * np.array([np.cos(last_joint), np.sin(last_joint)])
        self._line(image, centre - finger, centre + finger, TOOL_COLOUR)
        return image

    def _line(self, image: U8, begin: F64, end: F64, colour: U8) -> None:
        along = np.linspace(0.0, 1.0, SAMPLES)[:, None]
        pixels = (begin + along * (end - begin)).astype(int)[:, None, :] + self._brush
        rows = np.clip(pixels[..., 0], 0, self._height - 1)
        columns = np.clip(pixels[..., 1], 0, self._width - 1)
        image[rows, columns] = colour
