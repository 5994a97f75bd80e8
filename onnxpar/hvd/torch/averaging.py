"""Averages the gradients of a PyTorch module over the ranks in its backward passes, and gives all
ranks the same buffers (such as running statistics)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from onnxpar.base.errors import InputError
from onnxpar.hvd.process_sets import ProcessSet
from onnxpar.hvd.torch.backward_hooks import Named, Passes
from onnxpar.hvd.torch.broadcast_state import share
from onnxpar.hvd.torch.buckets import Buckets, Reducer, filled


class Averaging(Passes):
    """Averages the gradients of a module's parameters in each backward pass, as long as this object
    or the result of a forward pass exists.

    label        the module's name in errors; equal on all ranks
    process_set  the ranks
    limit        bytes of gradients that are sent together (a bucket)
    reducer      returns an object that reduces a bucket, for each bucket
    """

    def __init__(
        self,
        label: str,
        process_set: ProcessSet,
        module: Any,
        limit: float,
        reducer: Callable[[], Reducer],
    ) -> None:
        self.active = True
        """False while backward passes add up gradients on this rank alone."""
        self.root: int | None = None
        """The rank whose buffers all ranks get; None for the first rank."""
        self.factor = 1.0
        """Factor of averages over all ranks."""
        self._module = module
        self._process_set = process_set
        self._trained = trained_of(module)
        in_turn = dict(reversed(list(self._trained.items())))
        self._buckets = Buckets(
            label, process_set, filled(in_turn, limit), reducer, _sparse_of(module)
        )
        self._times: Counter[str] = Counter()
        """Number of gradients of each parameter in this pass."""
        self._late = set(self._trained)
        """Parameters that wait for the end of the pass: in the first pass, all; later, parameters
        with several gradients in one pass, which checkpoints can cause."""
        self._differs = False
        """True if the buffers may differ from the root's."""
        self.watch(self._trained)

    def is_current(self) -> bool:
        """Returns True if the module still has the parameters that required a gradient at the
        start, and no others that require one."""
        now = trained_of(self._module)
        return now.keys() == self._trained.keys() and all(
            now[name] is parameter for name, parameter in self._trained.items()
        )

    def share_buffers(self) -> None:
        """Overwrites the buffers of all ranks with the buffers of the rank `root`, if they may
        differ."""
        if self._differs:
            root = self._process_set.ranks[0] if self.root is None else self.root
            share(dict(self._module.named_buffers()), root, self._process_set)
            self._differs = False

    def buffers_differ(self) -> None:
        """Records that a forward pass may have changed the buffers of this rank."""
        self._differs = True

    def follow(self, outputs: Any) -> None:
        """Lets all ranks average in the backward pass from these outputs, even if parameters get
        their gradients in a nested backward pass, as in torch.utils.checkpoint."""
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(self.enter)

    def contribute_nothing(self) -> None:
        """Takes part in a backward pass of other ranks with zero gradients; this rank's gradients
        stay as they are."""
        kept = {name: parameter.grad for name, parameter in self._trained.items()}
        self._module.zero_grad()
        self.begin_pass()
        with torch.no_grad():
            self.end_pass()
        for name, grad in kept.items():
            self._trained[name].grad = grad

    def has_gradient(self, name: str) -> None:
        """Records that a backward pass has added to the gradient of a parameter, and sends the
        gradient if the pass cannot add to it again. Errors: InputError if a gradient changes after
        it was sent."""
        if not self.active:
            return
        self.enter()
        self._times[name] += 1
        if self._times[name] > 1 and name not in self._late:
            if self._buckets.is_sent(name):
                raise InputError(
                    f"DistributedDataParallel: {name!r} has a gradient again in the same backward "
                    "pass, after it was sent; checkpoint with use_reentrant=False"
                )
            self._late.add(name)
        elif name not in self._late:
            self._buckets.ready(name)

    def begin_pass(self) -> None:
        """Forgets the gradients of the last pass."""
        self._times.clear()
        self._buckets.reset()
        self._buckets.count()

    def end_pass(self) -> None:
        """Waits for the averages, applies `factor`, and shares the buffers."""
        self._late = {name for name in self._late if self._times[name] > 1}
        self._buckets.finish()
        if self.factor != 1:
            for parameter in self._trained.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.factor)
        self.share_buffers()


def trained_of(module: Any) -> Named:
    """Returns the parameters of a module that require a gradient, by name."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def _sparse_of(module: Any) -> list[str]:
    """Returns the names of the parameters that get sparse gradients: the weights of embeddings with
    `sparse=True`."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    ids = {
        id(each.weight) for each in module.modules() if isinstance(each, embeddings) and each.sparse
    }
    return [name for name, parameter in module.named_parameters() if id(parameter) in ids]
