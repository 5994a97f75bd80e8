"""What makes the plans of one training step for samples of several lengths agree."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.lengths import same_cut
from onnxpar.compiler.plan import Plan, Port
from onnxpar.graph.training_spec import Step
from onnxpar.layout.dims import dim_text
from onnxpar.layout.layout import leaves
from onnxpar.layout.mesh import Mesh
from onnxpar.load.read_file import read_proto
from onnxpar.planner.options import Options, preset_or_search
from onnxpar.planner.request import model_digest
from onnxpar.search.search import AUTO
from onnxpar.strategy.strategy import Strategy

_LOSS, _UPDATE = "loss/", "update/"
"""What names of the nodes and constants of a loss and of an optimizer begin with."""


@dataclass(frozen=True)
class Pins:
    """How states, inputs and outputs are to be split, by name, so that all plans split them alike.

    whole  those that every rank holds whole in all plans, such as a table of positions, of which
           each length reads other rows; with their number of dimensions
    alike  the layouts that the shorter steps take over from the longest
    """

    whole: Mapping[str, int] = field(default_factory=dict)
    alike: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def more(self, plans: Sequence[Plan]) -> Pins:
        """Returns what is needed besides to make these plans agree, the longest first; the same if
        they do."""
        first, *others = [{p.name: p for p in (*plan.inputs, *plan.outputs)} for plan in plans]
        whole, alike = dict(self.whole), dict(self.alike)
        paired = {name for pair in plans[0].states for name in pair}
        for names in [*plans[0].states, *((name,) for name in first if name not in paired)]:
            each = [[ports[name] for ports in (first, *others) if name in ports] for name in names]
            alone = [one[0] for one in each]
            if all(
                same_cut(one, port)
                for one, ports in zip(alone, each, strict=True)
                for port in ports
            ):
                continue
            fits = all(
                _has_parts(one, port)
                for one, ports in zip(alone, each, strict=True)
                for port in ports
            )
            for name, port in zip(names, alone, strict=True):
                if fits and name not in alike and port.layout is not None:
                    alike[name] = [
                        dim_text(dim, plans[0].mesh) for dim in port.layout.normalized().dims
                    ]
                else:
                    whole[name] = len(port.shape or ())
        return Pins(whole, {n: texts for n, texts in alike.items() if n not in whole})

    def on(self, options: Options, mesh: Mesh | None = None) -> Options:
        """Returns the options for the longest step or, with its mesh, for a shorter one. Errors:
        StrategyError for a state that is to be whole, and that the options split."""
        before = options.strategy or Strategy()
        entries: dict[str, Any] = {name: [None] * rank for name, rank in self.whole.items()}
        for name in entries:
            if escape(name) in before.tensors:
                raise StrategyError(
                    f"--shorter: each length splits {name!r} in another way than the strategy "
                    "says; split another dimension, or another tensor"
                )
        if mesh is not None:
            entries |= self.alike
        searches = options.strategy is None and preset_or_search(options) is None
        search = AUTO if searches and options.search is None else options.search
        pins = {escape(name): entry for name, entry in entries.items()}
        strategy = replace(before, tensors={**before.tensors, **pins})
        own = replace(options, strategy=strategy, search=search) if pins else options
        return own if mesh is None else replace(own, devices=mesh.size, mesh=mesh)


def _has_parts(one: Port, two: Port) -> bool:
    """True if the dimensions of two ports consist of as many parts."""
    layouts = [port.layout for port in (one, two)]
    counts = [[len(list(leaves(d))) for d in each.dims] for each in layouts if each]
    return all(each == counts[0] for each in counts)


def check_same_step(longest: Path, shorter: Sequence[Path]) -> None:
    """Checks what plans do not show: that steps begin with the same values, and have the same loss
    and hyperparameters. Errors: StrategyError for a file that differs."""
    first = read_proto(longest)
    kept = {slot.input for slot in _step_of(first, longest).slots}
    for file in shorter:
        other = read_proto(file)
        _step_of(other, file)
        own, given = (_values(proto, kept) for proto in (first, other))
        odd = [name for name in own.keys() | given.keys() if name not in own or name not in given]
        odd += [
            name
            for name in own.keys() & given.keys()
            if not _are_equal((own[name], longest.parent), (given[name], file.parent))
        ]
        ops = [
            [n.op_type for n in p.graph.node if n.name.startswith(_LOSS)] for p in (first, other)
        ]
        if odd or ops[0] != ops[1]:
            weights = sorted(name for name in odd if name in kept)
            what = f"{weights[0]!r} has other values" if weights else "its hyperparameters differ"
            what = "its loss is another one" if not odd else what
            raise StrategyError(
                f"{file} is another training step than {longest}: {what}; write both of one model "
                "with the same options of `onnxpar grad`, but for the length in --dim"
            )


def _step_of(proto: onnx.ModelProto, file: Path) -> Step:
    """Errors: StrategyError if a model is no training step."""
    step = Step.of(proto)
    if step is None:
        raise StrategyError(f"--shorter: {file} is no training step; write one with `onnxpar grad`")
    return step


def _values(proto: onnx.ModelProto, kept: Collection[str]) -> dict[str, onnx.TensorProto]:
    """The first values of states, and the numbers by which the optimizer updates them."""
    return {
        t.name: t for t in proto.graph.initializer if t.name in kept or t.name.startswith(_UPDATE)
    }


def _are_equal(*each: tuple[onnx.TensorProto, Path]) -> bool:
    one, two = (numpy_helper.to_array(tensor, str(folder)) for tensor, folder in each)
    return one.dtype == two.dtype and np.array_equal(one, two)


def digests_beside(path: Path, shorter: Sequence[Path]) -> dict[str, Any]:
    """Returns the digests of the models of shorter steps, by path from the folder of the step."""
    return {os.path.relpath(file, path.parent): model_digest(file) for file in shorter}
