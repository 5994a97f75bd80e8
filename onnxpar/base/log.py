"""The logger of onnxpar, `logging.getLogger("onnxpar")`: debug messages tell what the compiler does
and decides, info messages what the user of a command may want to know."""

from __future__ import annotations

import logging

LOG = logging.getLogger("onnxpar")
