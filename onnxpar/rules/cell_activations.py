"""Activation functions of recurrent cells (RNN, GRU, LSTM), as chains of ONNX ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

DEFAULT = {
    "RNN": ("tanh",),
    "GRU": ("sigmoid", "tanh"),
    "LSTM": ("sigmoid", "tanh", "tanh"),
}
"""The activations of one direction that an op has by default, in the order f, g, h of the ONNX
standard's equations."""
_OPS = {
    "relu": "Relu",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "leakyrelu": "LeakyRelu",
    "hardsigmoid": "HardSigmoid",
    "elu": "Elu",
    "softsign": "Softsign",
    "softplus": "Softplus",
}
_WITH_BETA = {"affine", "scaledtanh", "hardsigmoid"}
_WITH_ALPHA = {*_WITH_BETA, "leakyrelu", "thresholdedrelu", "elu"}

Step = tuple[str, tuple[float, ...], dict[str, float]]
"""(op, further operands, attributes), as in ("Clip", (-1.0, 1.0), {}); the op's first operand is
the result of the step before."""


@dataclass(frozen=True)
class Activation:
    """An activation function, by its ONNX name in lower case. Its operand is clipped to
    [-clip, clip] first.

    As in onnxruntime, alpha and beta have the defaults of the ONNX op with that name; the defaults
    of ThresholdedRelu, and of functions that are not ONNX ops, are 0.
    """

    name: str
    alpha: float | None = None
    beta: float | None = None
    clip: float | None = None

    def steps(self) -> list[Step]:
        """Returns the ops that compute the activation, in order:
        [("Clip", (-1, 1), {}), ("Tanh", (), {})]."""
        bound: list[Step] = []
        if self.clip is not None:
            bound = [("Clip", (-self.clip, self.clip), {})]
        return [*bound, *self._function()]

    def _function(self) -> list[Step]:
        """The steps of the function itself, without the clip."""
        alpha, beta = self.alpha or 0.0, self.beta or 0.0
        if self.name == "affine":
            return [("Mul", (alpha,), {}), ("Add", (beta,), {})]
        if self.name == "scaledtanh":
            return [("Mul", (beta,), {}), ("Tanh", (), {}), ("Mul", (alpha,), {})]
        if self.name == "thresholdedrelu":
            return [("ThresholdedRelu", (), {"alpha": alpha})]
        options = {"alpha": self.alpha, "beta": self.beta}
        return [(_OPS[self.name], (), {k: g for k, g in options.items() if g is not None})]


def activations_of(node: gs.Node) -> list[list[Activation]]:
    """Returns the activations of each direction of an RNN, GRU or LSTM node: a GRU in one direction
    has [[sigmoid, tanh]]. ONNX lists alphas and betas only for activations that take one, in
    order."""
    default: Sequence[str] = DEFAULT[node.op]
    directions = 2 if node.attrs.get("direction") == "bidirectional" else 1
    names = [str(n).lower() for n in node.attrs.get("activations", [*default] * directions)]
    alphas = iter(node.attrs.get("activation_alpha", []))
    betas = iter(node.attrs.get("activation_beta", []))
    clip: Any = node.attrs.get("clip")
    activations = []
    for name in names:
        alpha = next(alphas, None) if name in _WITH_ALPHA else None
        beta = next(betas, None) if name in _WITH_BETA else None
        activations.append(Activation(name, alpha, beta, clip))
    return [activations[i : i + len(default)] for i in range(0, len(activations), len(default))]
