"""The MLP of digits.py in a loop of one's own, on any number of ranks.

    python examples/hvd_digits.py
    mpirun -n 4 python examples/hvd_digits.py
    mpirun --hostfile hosts -n 4 python examples/hvd_digits.py      # hosts: localhost slots=4

A graph that onnxpar has differentiated tells loss and gradients, run by an ordinary onnxruntime in
each process; onnxpar.hvd averages them over the ranks. Each rank takes batches of 16, so that all
take larger ones together, at a learning rate that is scaled by their number.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from digits import build, data
from onnx import numpy_helper

import onnxpar.hvd as hvd
from onnxpar.training import Step, grad

BATCH, EPOCHS, RATE = 16, 10, 0.02


def differentiated() -> tuple[ort.InferenceSession, Step, dict[str, np.ndarray]]:
    """A session that tells loss and gradients, what its ports are, and the first parameters."""
    with tempfile.TemporaryDirectory() as temporary:
        model, step = Path(temporary) / "mlp.onnx", Path(temporary) / "step.onnx"
        build("mlp", model)
        weights = onnx.load(model).graph.initializer
        how = {"loss": "softmax-cross-entropy", "optimizer": "none", "dims": {"batch": BATCH}}
        ports = grad(model, step, **how)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # no warnings that parameters are inputs: they are fed
        session = ort.InferenceSession(str(step), options, providers=["CPUExecutionProvider"])
    params = {w.name: numpy_helper.to_array(w).copy() for w in weights}
    return session, ports, params


def accuracy(params: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that the MLP knows."""
    h = np.maximum(images.reshape(len(images), -1) @ params["w1"] + params["b1"], 0)
    logits = h @ params["w2"] + params["b2"]
    return float((logits.argmax(1) == labels).mean())


def main(result: str | None = None) -> None:
    """Trains, prints a loss for each epoch and the accuracy, and saves the parameters."""
    hvd.init()
    train, held_out = data()
    session, ports, params = differentiated()
    hvd.broadcast_parameters(params, root_rank=0)
    rate = hvd.scale_learning_rate(RATE)
    optimizer = hvd.DistributedOptimizer(hvd.SGD(lr=rate, momentum=0.9))

    sampler = hvd.DistributedSampler(len(train["labels"]), seed=1)
    steps = len(sampler) // BATCH
    names = [f"{name}.grad" for name in params]
    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        for mine in sampler.indices()[: steps * BATCH].reshape(steps, BATCH):
            batch = {name: train[name][mine] for name in ports.data}
            loss, *grads = session.run([ports.loss, *names], {**batch, **params})
            optimizer.step(params, dict(zip(params, grads, strict=True)))
        loss = hvd.allreduce(loss, name="loss")
        if hvd.rank() == 0:
            print(f"epoch: {epoch} step: {steps}, loss is {loss:.4f}")

    if hvd.rank() == 0:
        print(f"held-out accuracy: {accuracy(params, held_out['x'], held_out['labels']):.1%}")
        if result:
            np.savez(result, **params)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
