"""Linear regression on any number of ranks, in a loop of one's own.

    python examples/hvd_linear.py
    mpirun -n 4 python examples/hvd_linear.py

An onnxruntime session gives loss and gradients of this rank's part of a batch, onnxpar.hvd the
average over all. The result is the same for 1, 2, 4 or 8 ranks, up to rounding.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser
import onnxruntime as ort

import onnxpar.hvd as hvd

SAMPLES, FEATURES, BATCH, EPOCHS = 1024, 8, 64, 5

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
step (double[n,8] x, double[n] y, double[8] w, double b) => (double loss, double[8] dw, double db)
{
  predicted = MatMul(x, w)
  shifted = Add(predicted, b)
  error = Sub(shifted, y)
  squares = Mul(error, error)
  loss = ReduceMean <keepdims = 0> (squares)
  two = Constant <value = double {2}> ()
  twice = Mul(error, two)
  columns = Transpose(x)
  parts = Mul(columns, twice)
  dw = ReduceMean <axes = [1], keepdims = 0> (parts)
  db = ReduceMean <keepdims = 0> (twice)
}"""


def data() -> tuple[np.ndarray, np.ndarray]:
    """Noisy samples of a line; the same on all ranks."""
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, FEATURES))
    noise = 0.1 * random.standard_normal(SAMPLES)
    return x, x @ np.arange(1.0, FEATURES + 1) - 3 + noise


def main(result: str | None = None) -> None:
    """Trains, prints a loss for each epoch, and saves the parameters to `result`."""
    hvd.init()
    model = onnx.parser.parse_model(MODEL)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(hvd.rank())  # ranks begin with parameters of their own ...
    params = {"w": random.standard_normal(FEATURES), "b": np.zeros(())}
    hvd.broadcast_parameters(params, root_rank=0)  # ... and go on with those of rank 0
    optimizer = hvd.DistributedOptimizer(hvd.SGD(lr=0.02, momentum=0.9))

    x, y = data()
    sampler = hvd.DistributedSampler(SAMPLES, seed=1)
    local_batch = BATCH // hvd.size()
    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        for mine in sampler.indices().reshape(-1, local_batch):
            feeds = {"x": x[mine], "y": y[mine], **params}
            loss, *grads = session.run(["loss", "dw", "db"], feeds)
            optimizer.step(params, dict(zip("wb", grads, strict=True)))
        loss = hvd.allreduce(loss, name="loss")
        if hvd.rank() == 0:
            print(f"epoch: {epoch} step: {len(sampler) // local_batch}, loss is {loss:.4f}")

    if result and hvd.rank() == 0:
        np.savez(result, **params)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
