"""Sounds that models/encoder_decoder_models.py makes, too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RATE = 16000


def sound(seed: int, seconds: float) -> NDArray[np.int16]:
    """Tones that come and go, in noise; of 16-bit samples."""
    random = np.random.default_rng(seed)
    at = np.arange(int(RATE * seconds)) / RATE
    found = 0.05 * random.standard_normal(len(at))
    for _ in range(6):
        pitch, start, length = random.uniform(80, 4000), random.uniform(0, seconds), 0.4
        found += 0.2 * np.sin(2 * np.pi * pitch * at) * (abs(at - start) < length)
    return np.round(found.clip(-1, 1) * 32767).astype(np.int16)
