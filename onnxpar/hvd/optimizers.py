"""Optimizers for NumPy arrays, with the arithmetic of torch.optim.

`step` changes the parameters in place. You may change all fields between steps, such as `lr` for a
schedule. State is kept by parameter name, in the parameter's dtype.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.sparse import IndexedSlices

State = dict[str, Any]


@dataclass
class Optimizer(ABC):
    """Base class of optimizers: has the learning rate `lr`, and a state for each parameter by name;
    `step` updates parameters by name."""

    lr: float
    state: dict[str, State] = field(default_factory=dict, init=False, repr=False)

    def step(self, params: Mapping[str, Array], grads: Mapping[str, Any]) -> None:
        """Updates in place each parameter that has a gradient, which may be `IndexedSlices`.

        Errors: InputError if a gradient has no parameter of its name, or another shape than the
        parameter.
        """
        fitting = {name: fitted(name, params, grad) for name, grad in grads.items()}
        for name, grad in fitting.items():
            state = self.state.setdefault(name, {})
            if not isinstance(grad, IndexedSlices):
                self._update(params[name], grad, state)
            elif not self._update_rows(params[name], grad, state):
                self._update(params[name], grad.dense(), state)

    @abstractmethod
    def _update(self, param: Array, grad: Array, state: State) -> None:
        """Updates one parameter and its state in place by a dense gradient."""

    def _update_rows(self, param: Array, grad: IndexedSlices, state: State) -> bool:
        """Updates the rows of a sparse gradient and returns True, if the dense gradient would
        change no other row; otherwise changes nothing and returns False."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the options and the state."""
        return copy.deepcopy({each.name: getattr(self, each.name) for each in fields(self)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores options and state that `state_dict` returned. Errors: InputError for the state
        of another optimizer."""
        known = {each.name for each in fields(self)}
        if set(state) != known:
            raise InputError(
                f"this is not the state of {type(self).__name__}: it has {sorted(state)} instead "
                f"of {sorted(known)}"
            )
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(self, name, value)


@dataclass
class SGD(Optimizer):
    """Gradient descent with momentum; weight decay is added to the gradient."""

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def _update(self, param: Array, grad: Array, state: State) -> None:
        if self.weight_decay:
            grad = grad + self.weight_decay * param
        if self.momentum:
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = np.array(grad, param.dtype)
            else:
                buffer *= self.momentum
                buffer += (1 - self.dampening) * grad
            grad = grad + self.momentum * buffer if self.nesterov else buffer
        param -= self.lr * grad

    def _update_rows(self, param: Array, grad: IndexedSlices, state: State) -> bool:
        if self.weight_decay or self.momentum:
            return False
        np.subtract.at(param, grad.indices, self.lr * grad.values)
        return True


@dataclass
class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980); weight decay is added to the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def _update(self, param: Array, grad: Array, state: State) -> None:
        grad = self._decay(param, grad)
        if not state:
            state.update(step=0, exp_avg=np.zeros_like(param), exp_avg_sq=np.zeros_like(param))
        state["step"] += 1
        (beta1, beta2), step = self.betas, state["step"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean *= beta1
        mean += (1 - beta1) * grad
        square *= beta2
        square += (1 - beta2) * grad * grad
        scale = np.sqrt(square)
        scale /= math.sqrt(1 - beta2**step)
        scale += self.eps
        param -= self.lr / (1 - beta1**step) * mean / scale

    def _decay(self, param: Array, grad: Array) -> Array:
        """Returns the gradient after weight decay; a subclass may decay the parameter instead."""
        return grad + self.weight_decay * param if self.weight_decay else grad


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

    weight_decay: float = 0.01

    def _decay(self, param: Array, grad: Array) -> Array:
        param *= 1 - self.lr * self.weight_decay
        return grad


def fitted(name: str, params: Mapping[str, Array], grad: Any) -> Any:
    """Returns the gradient of the parameter `name`; a sparse gradient without a shape gets that of
    the parameter. Errors: InputError if there is no such parameter, or the shapes differ."""
    if name not in params:
        raise InputError(f"the gradient {name!r} has no parameter of this name; {_some(params)}")
    wanted = params[name].shape
    if isinstance(grad, IndexedSlices):
        grad = IndexedSlices(grad.values, grad.indices, grad.dense_shape or wanted)
        shape = (*grad.dense_shape[:1], *grad.values.shape[1:])
    else:
        shape = grad.shape
    if shape != wanted:
        raise InputError(
            f"parameter {name!r} has shape {list(wanted)}, but its gradient has {list(shape)}"
        )
    return grad


def _some(params: Mapping[str, Array]) -> str:
    """Returns the first names of parameters in words, for errors."""
    return f"the parameters are {', '.join(sorted(params)[:8])}{' ...' if len(params) > 8 else ''}"
