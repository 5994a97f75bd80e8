"""The models, training steps and strategies that bench_strategies.py compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PRESETS = ("data-parallel", "tensor-parallel", "sequence-parallel")
STEP_PRESETS = ("data-parallel", "zero1", "zero3", "tensor-parallel")
CHOSEN = "auto"

Entries = Mapping[str, Mapping[str, Any]]
COLUMNS, SUMS = {"n": "tp"}, {"k": "tp"}
BATCH = [["tp", 1, 1], [1, 1]]
WHOLE = [[1, 1, 1], [1, 1]]
HEADS = {f"*/attention/self/{name}/MatMul": COLUMNS for name in ("query", "key", "value")}
MLP = {"*/intermediate/dense/MatMul": COLUMNS}
BERT: dict[str, Entries] = {
    "whole": {},
    "heads": {"shard": HEADS},
    "MLPs": {"shard": MLP},
    "heads and MLPs": {"shard": HEADS | MLP},
    "heads and MLP of layer 1": {
        "shard": {f"*layer.1{name[1:]}": split for name, split in (HEADS | MLP).items()}
    },
    "MLP of layer 0": {"shard": {"*layer.0/intermediate/dense/MatMul": COLUMNS}},
    "columns of all products": {"shard": {"*layer.*/MatMul": COLUMNS}},
    "columns of heads, sums of the rest": {"shard": {"*layer.*/dense/MatMul": SUMS} | HEADS},
    "rows of the table of words": {"shard": {"*word_embeddings/Gather": {"v": "tp"}}},
    "width of the table of words": {"shard": {"*word_embeddings/Gather": {"d1": "tp"}}},
    "sequence": {"tensors": {"input_ids": [1, "tp"]}},
    "batch, MLPs whole": {
        "shard": {
            "*/attention/self/query/MatMul": BATCH,
            "*/intermediate/dense/MatMul": WHOLE,
            "*layer.*/output/dense/MatMul": WHOLE,
        }
    },
    "batch, columns of MLPs": {"shard": {"*/attention/self/query/MatMul": BATCH} | MLP},
}

IMAGES, HEIGHT, ALL = [["tp", 1, 1, 1]], [[1, 1, "tp", 1]], [[1, 1, 1, 1]]
OUT, INTO = {"o": "tp"}, {"c": "tp"}
RESNET: dict[str, Entries] = {
    "whole": {},
    "height": {"tensors": {"pixel_values": HEIGHT[0]}},
    "width": {"tensors": {"pixel_values": [1, 1, 1, "tp"]}},
    "output channels": {"shard": {"*stages.*Conv": OUT}},
    "input channels": {"shard": {"*stages.*Conv": INTO}},
    "channels within blocks": {
        "shard": {"*/layer/layer.0/*Conv": OUT, "*/layer/layer.1/*Conv": INTO}
    },
    "channels of stage 3": {"shard": {"*stages.3/*layer.0/*Conv": OUT}},
    "3x3 channels of stages 2, 3": {"shard": {"*stages.[23]/*/layer/layer.1/*Conv": OUT}},
    "batch of stage 0": {"shard": {"*stages.0/*Conv": IMAGES, "*stages.1/*Conv": ALL}},
    "batch, from stage 2 on channels": {
        "shard": {"*stages.[01]/*Conv": IMAGES, "*stages.[23]/*Conv": OUT}
    },
    "height, from stage 2 on batch": {
        "shard": {"*stages.[01]/*Conv": HEIGHT, "*stages.[23]/*Conv": IMAGES}
    },
    "batch, from stage 2 on whole": {
        "shard": {"*stages.[01]/*Conv": IMAGES, "*stages.[23]/*Conv": ALL}
    },
}


@dataclass(frozen=True)
class Case:
    """A model with its open sizes, and its strategies beside the presets and the search. With a
    loss, its training step with AdamW."""

    model: str
    dims: Mapping[str, int]
    strategies: Mapping[str, Entries] = field(default_factory=dict)
    loss: str | None = None

    @property
    def presets(self) -> tuple[str, ...]:
        """The presets to compare."""
        return STEP_PRESETS if self.loss else PRESETS

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.dims.items())
        return f"{'training step of ' if self.loss else ''}{self.model}.onnx {sizes}".strip()


TOKENS = {"batch": 64, "seq": 16}
ENTROPY = "softmax-cross-entropy"
CASES = {
    "bert": Case("bert.legacy.dynamic", TOKENS, BERT),
    "resnet": Case("resnet.legacy.dynamic", {"batch": 8}, RESNET),
    "bert-step": Case("bert.legacy.dynamic", TOKENS, loss=ENTROPY),
    "gpt2-step": Case("gpt2.legacy.dynamic", TOKENS, loss=ENTROPY),
    "resnet-step": Case("resnet.legacy.training", {}, loss=ENTROPY),
}
