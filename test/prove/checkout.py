"""Import it first: makes a checkout that nobody installed importable, on a machine that has torch but no ROS."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if importlib.util.find_spec("phyai_engine") is None:
    sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("phyai_kernels") is None:
    kernels = types.ModuleType("phyai_kernels")
    kernels.__path__ = [str(ROOT / "kernels")]
    sys.modules[kernels.__name__] = kernels


def for_children(folder: Path) -> None:
    """The same for every process that this one starts from now on. :param folder: an empty one, kept until then."""
    (folder / "phyai_kernels").symlink_to(ROOT / "kernels")
    rest = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder), *([rest] if rest else [])])
