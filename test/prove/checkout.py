"""Import it first: makes a checkout that nobody installed importable, on a machine that has torch but no ROS."""

from __future__ import annotations

import importlib.util
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
