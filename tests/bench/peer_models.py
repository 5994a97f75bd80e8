"""The models of bench_peers.py, with random weights, and how onnxruntime and onnxpar run them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from bench import llama_shape, model_shapes
from bench.peers import Run
from onnx import TensorProto, numpy_helper

import onnxpar
from onnxpar.training import Trainer, grad

RANKS = 2
RATE = 1e-3
DECAY = 0.01
FROZEN = "scale_*"
Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model: what writes it, its sizes, and the largest number that an id may be, less one."""

    kind: str
    batch: int
    seq: int
    layers: int
    width: int
    heads: int
    vocab: int
    kv_heads: int = 0
    ffn: int = 0

    def write(self, path: Path) -> Path:
        """Writes the model with random weights."""
        if self.kind == "bert":
            size = {"layers": self.layers, "width": self.width, "heads": self.heads}
            return model_shapes.bert(path, self.batch, self.seq, **size, sparse=False)
        llama_shape.write(
            path,
            layers=self.layers,
            hidden=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocab=self.vocab,
            batch=self.batch,
            seq=self.seq,
        )
        return path

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """Random ids; of BERT also kinds, and a mask that hides nothing."""
        draw, shape = np.random.default_rng(0), (self.batch, self.seq)
        fed: dict[str, np.ndarray] = {"input_ids": draw.integers(0, self.vocab, shape)}
        if self.kind == "bert":
            fed |= {"token_type_ids": draw.integers(0, 2, shape), "mask": np.ones(shape, "f")}
        return fed

    @property
    def labels(self) -> np.ndarray:
        """A class for each sequence."""
        return np.random.default_rng(1).integers(0, 2, [self.batch])


CASES = {
    "BERT-base, 4 x 128": Case("bert", 4, 128, 12, 768, 12, 30522),
    "Llama, 8 layers of 1024, 1 x 256": Case("llama", 1, 256, 8, 1024, 16, 32000, 4, 2816),
    "encoder, 6 layers of 256, 1 x 128": Case("bert", 1, 128, 6, 256, 4, 30522),
}
TRAINED = {"encoder, 6 layers of 256, 16 x 128": Case("bert", 16, 128, 6, 256, 4, 30522)}


def weights_of(model: Path) -> dict[str, np.ndarray]:
    """The matrices and vectors of a model, without its constants."""
    loaded = onnx.load(model)
    return {
        tensor.name: numpy_helper.to_array(tensor).copy()
        for tensor in loaded.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and tensor.dims
    }


def onnxruntime(stack: ExitStack, model: Path, feeds: Feeds, threads: int) -> Run:
    """The unsplit model."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)[0]


def sharded(stack: ExitStack, par: Path, feeds: Feeds) -> Run:
    """Ranks of one thread."""
    session = stack.enter_context(onnxpar.InferenceSession(par, threads=1))
    return lambda: session.run(None, feeds)[0]


def trained(stack: ExitStack, par: Path, batch: Feeds) -> Run:
    """Steps of ranks of one thread; their losses."""
    trainer = stack.enter_context(Trainer(par, threads=1))
    return lambda: trainer.step(batch, RATE)["loss"]


def shard(model: Path, folder: Path, how: str, topology: str) -> Path:
    """The folder of a sharded model: by a preset, or by the search ("auto")."""
    given: dict[str, Any] = {"search": "auto"} if how == "auto" else {"preset": how}
    par = folder / f"{model.stem}.{how}.par"
    onnxpar.shard(model, par, devices=RANKS, topology=topology, **given)
    return par


def write_step(model: Path) -> tuple[Path, str]:
    """The training step of a classifier, with AdamW, and the name of its labels."""
    path = model.with_suffix(".step.onnx")
    step = grad(
        model,
        path,
        loss="softmax-cross-entropy",
        optimizer="adamw",
        weight_decay=DECAY,
        decay_all=True,
        frozen=[FROZEN],
    )
    (labels,) = set(step.data) - {port.name for port in onnx.load(model).graph.input}
    return path, labels
