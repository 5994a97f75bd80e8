"""Handwritten digits: an MLP, or a small convolution net with batch-norm and dropout, over 8 ranks.

    python examples/digits.py [--network conv] [--devices 4 | --mesh dp=2,tp=2] [--preset zero3]

The data are the 1797 images of 8x8 pixels that come with scikit-learn. What is trained becomes a
plain model again, which an ordinary onnxruntime then runs on images that it has not seen.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from sklearn.datasets import load_digits

import onnxpar
from onnxpar.trainer.data import Data
from onnxpar.trainer.loop import Run, records
from onnxpar.trainer.merge import merge
from onnxpar.trainer.rates import Schedule
from onnxpar.trainer.trainer import Trainer
from onnxpar.training import grad

BATCH, TRAINED_ON = 72, 1440

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
NETWORKS = {
    "mlp": """mlp (float[batch,1,8,8] x, float[64,64] w1, float[64] b1, float[64,10] w2,
float[10] b2) => (float[batch,10] logits)
{
  pixels = Flatten (x)
  h = Gemm (pixels, w1, b1)
  r = Relu (h)
  logits = Gemm (r, w2, b2)
}""",
    "conv": """conv (float[batch,1,8,8] x, float[16,1,3,3] w1, float[16] scale1, float[16] b1,
float[16] mean1, float[16] var1, float[32,16,3,3] w2, float[32] scale2, float[32] b2,
float[32] mean2, float[32] var2, float[512,10] w3, float[10] b3) => (float[batch,10] logits)
<float share = {0.25}, bool training = {1}>
{
  c1 = Conv <pads = [1, 1, 1, 1]> (x, w1)
  n1 = BatchNormalization (c1, scale1, b1, mean1, var1)
  r1 = Relu (n1)
  half = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r1)
  c2 = Conv <pads = [1, 1, 1, 1]> (half, w2)
  n2 = BatchNormalization (c2, scale2, b2, mean2, var2)
  r2 = Relu (n2)
  features = Flatten (r2)
  some = Dropout (features, share, training)
  logits = Gemm (some, w3, b3)
}""",
}


def build(network: str, path: Path) -> None:
    """Saves a network with weights that are not trained yet; its batch is open."""
    model = onnx.parser.parse_model(HEAD + NETWORKS[network])
    random = np.random.default_rng(0)
    for port in list(model.graph.input)[1:]:
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        if len(shape) > 1:
            fan_in = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
            value = random.standard_normal(shape) * (2 / fan_in) ** 0.5
        else:
            value = np.full(shape, float(port.name.startswith(("scale", "var"))))
        weight = onnx.numpy_helper.from_array(value.astype(np.float32), port.name)
        model.graph.initializer.append(weight)
        model.graph.input.remove(port)
    onnx.save(model, path)


def data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Images and labels to train on, and those that are held out."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, None] / 8 - 1).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    parts = slice(None, TRAINED_ON), slice(TRAINED_ON, None)
    train, held_out = ({"x": images[part], "labels": labels[part]} for part in parts)
    return train, held_out


def accuracy(model: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that a plain model knows."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"x": images})
    return float((logits.argmax(1) == labels).mean())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=list(NETWORKS), default="mlp")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--mesh")
    parser.add_argument("--preset", default="data-parallel")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


def main() -> None:
    """Trains; prints the loss and the accuracy of each epoch, and that of the plain model."""
    args = arguments()
    mesh = {"mesh": args.mesh} if args.mesh else {"devices": args.devices}
    statistics = {"batch_norm": "global"} if args.network == "conv" else {}
    train, held_out = data()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, step, par = (folder / name for name in ("net.onnx", "step.onnx", "step.par"))
        build(args.network, model)
        how = {"optimizer": "adam", "dims": {"batch": BATCH}, **statistics}
        grad(model, step, loss="softmax-cross-entropy", **how)
        onnxpar.shard(step, par, preset=args.preset, **mesh)
        schedule = Schedule("cosine", warmup=20)
        run = Run(args.epochs, args.lr, schedule, checkpoint=folder / "checkpoints")
        with Trainer(par) as trainer:
            batches, others = (
                Data.of(part, trainer.data, trainer.spec.batch) for part in (train, held_out)
            )
            for record in records(trainer, batches, run, others):
                if record.evaluation is not None:
                    at = f"epoch: {record.epoch} step: {record.step}"
                    known = record.evaluation["accuracy"]
                    print(f"{at}, loss is {record.values['loss']:.3g}, accuracy {known:.1%}")
        merge(folder / "checkpoints", model, folder / "trained.onnx")
        known = accuracy(folder / "trained.onnx", held_out["x"], held_out["labels"])
    print(f"held-out accuracy of the plain model: {known:.1%} of {len(held_out['labels'])}")


if __name__ == "__main__":
    main()
