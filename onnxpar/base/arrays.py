"""`Array`, the type hint of NumPy arrays of any dtype."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
