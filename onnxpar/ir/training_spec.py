"""What a model that is a training step says of itself: which of its ports are what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx

METADATA = "onnxpar.training"
"""The key of a step's description in a model's metadata."""

EVALUATION = "evaluation"
"""How outputs begin that evaluate, and the program that computes these alone."""
RESIDUAL = "residual"
"""The kind of slots that hold what ranks have not sent of a gradient."""
GRADIENT = ".grad"
"""Ends the names of outputs that are gradients."""
SCALE = "loss_scale"
"""The input and kind of slot that is the factor of the loss, where it changes."""
SKIPPED = "skipped"
"""The metric that is 1 where a gradient was no number and nothing was updated."""
SEED = "seed"
"""The input that all random numbers of a step follow from."""


@dataclass(frozen=True)
class Slot:
    """A tensor that a step hands to the next one.

    kind    "parameter", or what the optimizer calls it
    of      the parameter that it belongs to, empty for what belongs to all
    default whether the model has its first value; else it is zero
    """

    input: str
    output: str
    kind: str
    of: str = ""
    default: bool = False


@dataclass(frozen=True)
class Deal:
    """How the tensors of a step that is each rank's own program are dealt over a mesh.

    tensors  an entry for each, as strategies have them
    like     tensors that are dealt like another one
    """

    mesh: list[tuple[str, int]]
    tensors: dict[str, list[Any]]
    like: dict[str, str]


@dataclass
class Step:
    """What the ports of a training step are; `seed` is there where it draws random numbers. A step
    takes its batch in so many `turns`, one part after the other, and computes in a `precision` if
    that is not the parameters' type.

    `evaluation` are outputs that tell how good the model is when it is used, which no update needs:
    they can be computed alone. `gradients` are the tensors of the graph that are the gradients of
    the loss, by parameter. `deal` is there where the step is each rank's own program,
    `compression` where gradients travel between ranks otherwise than they are. `cautions` are
    sentences on what it trains otherwise than the network that was exported.
    """

    loss: str = "loss"
    rate: str = "learning_rate"
    seed: str | None = None
    turns: int = 1
    precision: str | None = None
    data: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    evaluation: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    deal: Deal | None = None
    compression: str = ""
    cautions: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As the metadata has it."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(header: onnx.ModelProto) -> Step | None:
        """The step that a model says it is, None where it says nothing of that."""
        for entry in header.metadata_props:
            if entry.key == METADATA:
                return Step.from_json(json.loads(entry.value))
        return None

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Step:
        """The inverse of `asdict`."""
        slots = [Slot(**slot) for slot in data["slots"]]
        deal = Deal(**data["deal"]) if data.get("deal") else None
        return Step(**{**data, "slots": slots, "deal": deal})

    @property
    def unsplit(self) -> Step:
        """The step as it was before ranks had something to keep for themselves."""
        return replace(self, slots=[s for s in self.slots if s.kind != RESIDUAL])

    @property
    def parameters(self) -> list[Slot]:
        """The slots that are parameters."""
        return [s for s in self.slots if s.kind == "parameter"]
