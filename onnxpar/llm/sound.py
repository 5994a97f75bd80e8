"""Sound for speech models: WAV files to samples, and samples to log-mel spectrograms as Whisper
reads them."""

from __future__ import annotations

import math
import wave
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.bundle_names import PREPROCESSOR
from onnxpar.base.errors import InputError, ModelError
from onnxpar.graph.model_folder import read_config

_HIGHEST = 8000.0
"""The highest frequency of the filters, in Hz."""
_LEAST_POWER = 1e-10
_RANGE = 8.0
"""The range of a spectrogram below its loudest value, in powers of ten."""
_LINEAR, _STEP = 1000.0, 27 / math.log(6.4)
"""Slaney's mel scale: linear up to 1000 Hz, and so many mels for each factor of e above."""


@dataclass(frozen=True)
class SoundFeatures:
    """How sound becomes features, by a preprocessor_config.json of Whisper.

    rate     samples per second
    seconds  the length of a window; longer sounds are cut into windows
    size     samples of each Fourier transform
    hop      samples from one column of features to the next
    mels     rows of features
    padding  the value of missing samples
    """

    rate: int
    seconds: int
    size: int
    hop: int
    mels: int
    padding: float = 0.0

    @staticmethod
    def of(folder: Path) -> SoundFeatures:
        """Returns the features that the configuration in a folder describes. Errors: ModelError if
        it is missing, or not that of Whisper."""
        file = folder / PREPROCESSOR
        if not file.exists():
            raise ModelError(
                f"{folder} has no {PREPROCESSOR}, which says how sound becomes features; shard a "
                "folder that has one, or give features (.npy) instead"
            )
        config = read_config(file)
        kind = config.get("feature_extractor_type", "WhisperFeatureExtractor")
        names = ("sampling_rate", "chunk_length", "n_fft", "hop_length", "feature_size")
        numbers = [config.get(name) for name in names]
        if kind != "WhisperFeatureExtractor" or not all(_is_count(n) for n in numbers):
            raise ModelError(
                f"{file} is that of {kind} with {dict(zip(names, numbers, strict=True))}; only a "
                "complete one of Whisper is known; give features (.npy) instead"
            )
        rate, seconds, size, hop, mels = map(int, filter(None, numbers))
        return SoundFeatures(
            rate, seconds, size, hop, mels, float(config.get("padding_value") or 0)
        )

    @property
    def samples(self) -> int:
        """The number of samples of a window."""
        return self.rate * self.seconds

    def windows(self, samples: Array) -> list[Array]:
        """Returns the samples of a sound cut into windows, at least one; the last may be
        shorter."""
        starts = range(0, max(len(samples), 1), self.samples)
        return [samples[at : at + self.samples] for at in starts]

    def of_sound(self, samples: Array) -> Array:
        """Returns the features of samples between -1 and 1, (mels, columns). Errors: InputError for
        more samples than one window has."""
        if samples.ndim != 1 or len(samples) > self.samples:
            raise InputError(
                f"a sound has {' x '.join(map(str, samples.shape))} samples, and the model reads "
                f"{self.seconds} s, {self.samples} samples of one channel, at once; cut it into "
                "windows"
            )
        whole = np.full(self.samples, self.padding)
        whole[: len(samples)] = samples
        half = self.size // 2
        around = np.pad(whole, half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(around, self.size)[:: self.hop]
        bell = np.hanning(self.size + 1)[:-1]
        power = np.abs(np.fft.rfft(frames * bell, axis=1)) ** 2
        levels = np.log10(np.maximum(self._filters @ power.T, _LEAST_POWER))[:, :-1]
        levels = np.maximum(levels, levels.max() - _RANGE)
        features: Array = ((levels + 4) / 4).astype(np.float32)
        return features

    @cached_property
    def _filters(self) -> Array:
        """The triangular filters that turn a power spectrum into mels, (mels, frequencies), each of
        the same area."""
        ends = _hertz(np.linspace(0, _mels(_HIGHEST), self.mels + 2))
        at = np.linspace(0, self.rate / 2, self.size // 2 + 1)
        rising = (at - ends[:-2, None]) / (ends[1:-1] - ends[:-2])[:, None]
        falling = (ends[2:, None] - at) / (ends[2:] - ends[1:-1])[:, None]
        filters: Array = np.maximum(0, np.minimum(rising, falling))
        return filters * (2 / (ends[2:] - ends[:-2]))[:, None]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _mels(hertz: float) -> float:
    """Returns the mels of a frequency above 1000 Hz, on Slaney's scale."""
    return 15 + math.log(hertz / _LINEAR) * _STEP


def _hertz(mels: Array) -> Array:
    """Returns the frequencies of mels on Slaney's scale, in Hz."""
    hertz: Array = np.where(mels < 15, mels * 200 / 3, _LINEAR * np.exp((mels - 15) / _STEP))
    return hertz


def read_wave(file: Path, rate: int) -> Array:
    """Returns the samples of a WAV file, between -1 and 1, mixed to one channel and resampled to
    `rate` samples per second. Errors: InputError for a file that is no WAV file of PCM samples."""
    remedy = f"convert it: ffmpeg -i {file} -ac 1 -ar {rate} -c:a pcm_s16le sound.wav"
    try:
        with wave.open(str(file), "rb") as stream:
            width, channels, own = (
                stream.getsampwidth(),
                stream.getnchannels(),
                stream.getframerate(),
            )
            data = stream.readframes(stream.getnframes())
    except (wave.Error, EOFError) as error:
        raise InputError(f"{file} is no WAV file of PCM samples ({error}); {remedy}") from None
    except OSError as error:
        raise InputError(f"{file}: cannot read it: {error.strerror or error}") from None
    if width not in (1, 2, 3, 4) or not own or not data:
        raise InputError(f"{file} has no samples, or samples of {width} bytes; {remedy}")
    samples = _decoded(data[: len(data) // (width * channels) * (width * channels)], width)
    mixed: Array = samples.reshape(-1, channels).mean(1)
    return _resampled(mixed, own, rate)


def _decoded(data: bytes, width: int) -> Array:
    """Returns PCM samples of `width` bytes each as numbers between -1 and 1."""
    if width == 1:
        samples: Array = (np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128
        return samples
    if width == 3:  # as the upper bytes of four
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, width = wide.tobytes(), 4
    return np.frombuffer(data, f"<i{width}") / float(1 << (8 * width - 1))


def _resampled(samples: Array, own: int, rate: int) -> Array:
    """Returns samples taken at `own` per second, converted to `rate` per second."""
    if own == rate:
        return samples
    from scipy.signal import resample_poly

    common = math.gcd(own, rate)
    resampled: Array = resample_poly(samples, rate // common, own // common)
    return resampled
