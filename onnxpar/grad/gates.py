"""Activations of recurrent cells: the functions, and how gradients pass them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxpar.grad.value import Value
from onnxpar.grad.vjp import Vjp, entry_of

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


@dataclass(frozen=True)
class Activation:
    """An activation by its name in small letters, and the bound of what it gets.

    Without alpha and beta they are those of the op, and 0 for the others and ThresholdedRelu, as
    in onnxruntime.
    """

    name: str
    alpha: float | None = None
    beta: float | None = None
    clip: float | None = None

    def __call__(self, x: Value) -> Gate:
        """Adds the function."""
        bounded = x if self.clip is None else x.op("Clip", -self.clip, self.clip)
        return Gate(x, self._function(bounded))

    def _function(self, x: Value) -> Value:
        alpha, beta = self.alpha or 0.0, self.beta or 0.0
        if self.name == "affine":
            return x.op("Mul", alpha).op("Add", beta)
        if self.name == "scaledtanh":
            return x.op("Mul", beta).op("Tanh").op("Mul", alpha)
        if self.name == "thresholdedrelu":
            return x.op("ThresholdedRelu", alpha=alpha)
        given = {"alpha": self.alpha, "beta": self.beta}
        return x.op(_OPS[self.name], **{k: g for k, g in given.items() if g is not None})


@dataclass(frozen=True)
class Gate:
    """An activation's operand and result; on the way every node reads the one before first."""

    x: Value
    y: Value

    def back(self, dy: Value) -> Value:
        """The gradient of the operand from that of the result."""
        at = self.y
        while at.tensor.name != self.x.tensor.name:
            node = at.tensor.inputs[0]
            entry = entry_of(node)
            assert entry is not None, node.op
            found = entry.function(Vjp(node, dy.builder, [dy], [True] + [False] * 2))[0]
            assert found is not None, node.op
            at, dy = dy.builder.value(node.inputs[0]), found
        return dy


def activations_of(v: Vjp, default: Sequence[str]) -> list[list[Activation]]:
    """Those of each direction of a node; slopes are consumed in order by those that have any."""
    ways = 2 if v.attr("direction") == "bidirectional" else 1
    names = [str(n).lower() for n in v.node.attrs.get("activations", [*default] * ways)]
    alphas = iter(v.node.attrs.get("activation_alpha", []))
    betas = iter(v.node.attrs.get("activation_beta", []))
    found = []
    for name in names:
        alpha = next(alphas, None) if name in _WITH_ALPHA else None
        beta = next(betas, None) if name in _WITH_BETA else None
        found.append(Activation(name, alpha, beta, v.attr("clip")))
    return [found[i : i + len(default)] for i in range(0, len(found), len(default))]
