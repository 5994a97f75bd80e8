"""A MatMul split ((2, 4), (4, 1)) and a ReLU split ((8, 1)), trained over 8 ranks.

    python examples/matmul_relu.py

The model is an ordinary one. The strategy counts parts of each dimension of each operand: rows of x
in 2 and columns in 4, rows of w in 4; the ranks then add up their terms of the product, and each
takes an eighth of the rows of that. How gradients travel follows from it.
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
STRATEGY = {"shard": {"matmul": ((2, 4), (4, 1)), "relu": ((8, 1),)}}

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
network (float[32,16] x, float[16,8] w) => (float[32,8] y) {
  [matmul] h = MatMul (x, w)
  [relu] y = Relu (h)
}"""


def build(path: Path) -> None:
    """Saves the model, with a weight that is not trained yet."""
    model = onnx.parser.parse_model(MODEL)
    weight = np.random.default_rng(0).standard_normal((16, 8)) / 4
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype(np.float32), "w"))
    del model.graph.input[1]
    onnx.save(model, path)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Samples of what another weight computes."""
    random = np.random.default_rng(1)
    x = random.standard_normal((SAMPLES, 16)).astype(np.float32)
    weight = random.standard_normal((16, 8)).astype(np.float32) / 4
    return x, np.maximum(x @ weight, 0)


def main() -> None:
    """Trains, and prints the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        model, step, par = (Path(folder) / name for name in ("net.onnx", "step.onnx", "step.par"))
        build(model)
        grad(model, step, loss="mse", optimizer="momentum")
        onnxpar.shard(step, par, devices=RANKS, strategy=STRATEGY)
        x, target = data()
        with Trainer(par) as trainer:
            for epoch in range(1, EPOCHS + 1):
                for i in range(SAMPLES // BATCH):
                    mine = slice(i * BATCH, (i + 1) * BATCH)
                    told = trainer.step({"x": x[mine], "target": target[mine]}, rate=0.2)
                    print(f"epoch: {epoch} step: {i + 1}, loss is {told['loss']:.3g}")


if __name__ == "__main__":
    main()
