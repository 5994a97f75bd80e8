"""Elastic training of PyTorch's modules: `onnxpar.hvd.elastic` with a state of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxpar.hvd.elastic import ArrayState, ElasticSampler, run
from onnxpar.hvd.torch.broadcast_state import broadcast_object

__all__ = ["ElasticSampler", "TorchState", "run"]


class TorchState(ArrayState):
    """State of a training run: a module, an optimizer, and plain objects.

    model      a module, or another object with `state_dict` and `load_state_dict`
    optimizer  an optimizer, or another object with these two methods
    kwargs     more modules or optimizers, samplers, and plain objects that `broadcast_object` can
               send
    """

    _broadcast: Callable[..., Any] = staticmethod(broadcast_object)

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(None, optimizer, model=model, **kwargs)
