"""Sound files become samples, and samples the features that Transformers computes."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
from committed import MODELS
from numpy.typing import NDArray
from sounds import RATE, sound

from onnxpar.base.errors import InputError, ModelError
from onnxpar.llm.sound import SoundFeatures, read_wave

WHISPER = MODELS / "llm" / "whisper"


def write(file: Path, samples: NDArray[np.int16], rate: int = RATE, channels: int = 1) -> Path:
    with wave.open(str(file), "wb") as stream:
        stream.setnchannels(channels)
        stream.setsampwidth(samples.dtype.itemsize)
        stream.setframerate(rate)
        stream.writeframes(samples.tobytes())
    return file


def test_features_are_those_of_transformers() -> None:
    wanted = json.loads((WHISPER / "expected.json").read_bytes())["features"]
    features = SoundFeatures.of(WHISPER)
    for seed, seconds in enumerate((2, 1.3, 0.4)):
        found = features.of_sound(sound(seed, seconds) / 32768)
        assert found.shape == (80, 200) and found.dtype == np.float32
        np.testing.assert_allclose(found[::8, ::20], wanted[seed], atol=5e-6)


def test_windows_hold_all_samples() -> None:
    features = SoundFeatures.of(WHISPER)
    samples = np.arange(70000) / 70000
    parts = features.windows(samples)
    assert [len(part) for part in parts] == [32000, 32000, 6000]
    np.testing.assert_array_equal(np.concatenate(parts), samples)
    assert [len(part) for part in features.windows(samples[:0])] == [0]
    with pytest.raises(InputError, match="a sound has 70000 samples, and the model reads 2 s"):
        features.of_sound(samples)


def test_samples_of_every_width(tmp_path: Path) -> None:
    samples = sound(3, 0.1)
    wanted = samples / 32768
    np.testing.assert_array_equal(read_wave(write(tmp_path / "2.wav", samples), RATE), wanted)
    wide = write(tmp_path / "4.wav", samples.astype(np.int32) << 16)  # type: ignore[arg-type]
    np.testing.assert_array_equal(read_wave(wide, RATE), wanted)
    narrow = write(tmp_path / "1.wav", ((samples >> 8) + 128).astype(np.uint8))  # type: ignore[arg-type]
    np.testing.assert_array_equal(read_wave(narrow, RATE), (samples >> 8) / 128)
    with wave.open(str(tmp_path / "3.wav"), "wb") as stream:
        stream.setparams((1, 3, RATE, 0, "NONE", ""))
        parts = (samples.astype(np.int32) << 8).view(np.uint8).reshape(-1, 4)
        stream.writeframes(parts[:, :3].tobytes())
    np.testing.assert_array_equal(read_wave(tmp_path / "3.wav", RATE), wanted)


def test_channels_are_mixed(tmp_path: Path) -> None:
    left, right = sound(4, 0.1), sound(5, 0.1)
    file = write(tmp_path / "a.wav", np.stack([left, right], 1), channels=2)
    np.testing.assert_allclose(read_wave(file, RATE), (left / 65536 + right / 65536), atol=1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_other_rates_are_resampled(rate: int, tmp_path: Path) -> None:
    def tone(at: int) -> NDArray[np.float64]:
        found: NDArray[np.float64] = 0.5 * np.sin(2 * np.pi * 440 * np.arange(at) / at)
        return found

    file = write(tmp_path / "a.wav", np.round(tone(rate) * 32767).astype(np.int16), rate)
    found = read_wave(file, RATE)
    assert len(found) == RATE
    np.testing.assert_allclose(found[500:-500], tone(RATE)[500:-500], atol=2e-3)


def test_other_files_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.mp3").write_bytes(b"ID3 no wave file at all" * 9)
    with pytest.raises(InputError, match=r"a.mp3 is no WAV file .*: ffmpeg -i .*a.mp3 -ac 1 -ar"):
        read_wave(tmp_path / "a.mp3", RATE)
    with pytest.raises(InputError, match=r"b.wav: cannot read it: No such file"):
        read_wave(tmp_path / "b.wav", RATE)
    write(tmp_path / "c.wav", sound(0, 0.1)[:0])
    with pytest.raises(InputError, match=r"c.wav has no samples"):
        read_wave(tmp_path / "c.wav", RATE)
    (tmp_path / "d.wav").write_bytes((tmp_path / "c.wav").read_bytes()[:30])
    with pytest.raises(InputError, match=r"d.wav is no WAV file"):
        read_wave(tmp_path / "d.wav", RATE)


def test_configurations_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no preprocessor_config.json"):
        SoundFeatures.of(tmp_path)
    config = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is that of Wav2Vec2FeatureExtractor"):
        SoundFeatures.of(tmp_path)
