"""Manual parallelism: a model whose slices and AllReduce are placed by hand, trained over 8 ranks.

    python examples/manual_parallel.py

Every rank runs this one program. It has all of the weights, takes the columns of the first and the
rows of the second that its number says, and adds up with the others what its part contributes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

import onnxpar
from onnxpar.trainer.trainer import Trainer
from onnxpar.training import grad

RANKS, SAMPLES, BATCH, EPOCHS = 8, 640, 32, 2

MODEL = """<ir_version: 8, opset_import: ["" : 17, "onnxpar" : 1]>
network (float[32,64] x, float[64,128] w1, float[128,10] w2) => (float[32,10] logits) {
  rank = onnxpar.Rank ()
  ranks = onnxpar.GroupSize ()
  rows = Constant <value_ints = [0]> ()
  columns = Constant <value_ints = [1]> ()
  sizes = Shape (w1)
  hidden = Gather (sizes, columns)
  shard = Div (hidden, ranks)
  begin = Mul (rank, shard)
  end = Add (begin, shard)
  own1 = Slice (w1, begin, end, columns)
  own2 = Slice (w2, begin, end, rows)
  h = MatMul (x, own1)
  r = Relu (h)
  part = MatMul (r, own2)
  logits = onnxpar.AllReduce (part)
}"""


def build(path: Path) -> None:
    """Saves the program of a rank, with weights that are not trained yet."""
    model = onnx.parser.parse_model(MODEL)
    random = np.random.default_rng(0)
    for port in list(model.graph.input)[1:]:
        rows, columns = (d.dim_value for d in port.type.tensor_type.shape.dim)
        weight = random.standard_normal((rows, columns)) / rows**0.5
        weight = onnx.numpy_helper.from_array(weight.astype(np.float32), port.name)
        model.graph.initializer.append(weight)
        model.graph.input.remove(port)
    onnx.save(model, path)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Samples of ten classes: a centre for each, and noise."""
    random = np.random.default_rng(1)
    labels = random.integers(0, 10, SAMPLES)
    centres = random.standard_normal((10, 64))
    noise = random.standard_normal((SAMPLES, 64))
    return (centres[labels] + noise).astype(np.float32), labels


def main() -> None:
    """Trains, and prints the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        model, step, par = (Path(folder) / name for name in ("net.onnx", "step.onnx", "step.par"))
        build(model)
        how = {"preset": "manual", "mesh": f"ranks={RANKS}"}
        grad(model, step, loss="softmax-cross-entropy", optimizer="momentum", **how)
        onnxpar.shard(step, par, preset="manual")
        x, labels = data()
        with Trainer(par) as trainer:
            for epoch in range(1, EPOCHS + 1):
                for i in range(SAMPLES // BATCH):
                    mine = slice(i * BATCH, (i + 1) * BATCH)
                    told = trainer.step({"x": x[mine], "labels": labels[mine]}, rate=0.01)
                    print(f"epoch: {epoch} step: {i + 1}, loss is {told['loss']:.3g}")


if __name__ == "__main__":
    main()
