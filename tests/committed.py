"""The committed exports of models/, and the sizes at which the dynamic ones are tested."""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).parent.parent / "models"

STATIC = sorted(path.name for path in MODELS.glob("*.static.onnx"))
DYNAMIC = sorted(path.name for path in MODELS.glob("*.dynamic.onnx"))
TRAINING = sorted(path.name for path in MODELS.glob("*.training.onnx"))

SYMBOLS = {
    "dlrm": ("batch",),
    "llama_decode": ("batch", "past"),
    "resnet": ("batch",),
    "t5": ("batch", "seq", "target"),
    "unet": ("batch",),
    "vit": ("batch",),
}
"""The symbols of a dynamic model's inputs, where they are not those of a text model."""

EVEN = {"batch": 4, "seq": 12, "target": 8, "past": 10}
ODD = {"batch": 5, "seq": 7, "target": 3, "past": 9}


def dims_of(model: str, sizes: dict[str, int]) -> dict[str, int]:
    """A size for each symbol that the model has."""
    return {s: sizes[s] for s in SYMBOLS.get(model.split(".")[0], ("batch", "seq"))}
