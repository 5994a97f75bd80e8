"""Makes the plans of one training step for samples of several lengths split their states in the
same way."""

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
from onnxpar.compiler.length_buckets import same_cut
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
"""Prefixes of the names of a step's nodes and constants that belong to the loss, and to the
optimizer."""


@dataclass(frozen=True)
class Pins:
    """Layouts that are requested for states, inputs and outputs, by name, so that all plans split
    them in the same way.

    whole  tensors that every rank holds whole in all plans, with their number of dimensions; such
           as a table of positions, of which each length reads different rows
    alike  layouts of the longest step that shorter steps must take over, as entries of a strategy
    """

    whole: Mapping[str, int] = field(default_factory=dict)
    alike: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def more(self, plans: Sequence[Plan]) -> Pins:
        """Returns these pins and further ones, for tensors that the plans split differently; equal
        pins if there are none. The plan of the longest step is first."""
        first, *shorter = [{p.name: p for p in (*plan.inputs, *plan.outputs)} for plan in plans]
        whole, alike = dict(self.whole), dict(self.alike)
        paired = {name for pair in plans[0].states for name in pair}
        for names in [*plans[0].states, *((name,) for name in first if name not in paired)]:
            ports_by_name = [
                [ports[name] for ports in (first, *shorter) if name in ports] for name in names
            ]
            longest = [same[0] for same in ports_by_name]
            if all(
                same_cut(of_longest, port)
                for of_longest, ports in zip(longest, ports_by_name, strict=True)
                for port in ports
            ):
                continue
            fits = all(
                _has_parts(of_longest, port)
                for of_longest, ports in zip(longest, ports_by_name, strict=True)
                for port in ports
            )
            for name, port in zip(names, longest, strict=True):
                if fits and name not in alike and port.layout is not None:
                    alike[name] = [
                        dim_text(dim, plans[0].mesh) for dim in port.layout.normalized().dims
                    ]
                else:
                    whole[name] = len(port.shape or ())
        return Pins(whole, {n: texts for n, texts in alike.items() if n not in whole})

    def on(self, options: Options, mesh: Mesh | None = None) -> Options:
        """Returns the options with these pins in the strategy: for the longest step, or if `mesh`
        is given (that of the longest step), for a shorter one. Errors: StrategyError for a state
        that must be whole, but that the options split."""
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
        pinned = replace(options, strategy=strategy, search=search) if pins else options
        return pinned if mesh is None else replace(pinned, devices=mesh.size, mesh=mesh)


def _has_parts(a: Port, b: Port) -> bool:
    """True if the dimensions of two inputs or outputs consist of equal numbers of factors."""
    layouts = [port.layout for port in (a, b)]
    counts = [[len(list(leaves(d))) for d in each.dims] for each in layouts if each]
    return all(each == counts[0] for each in counts)


def check_same_step(longest: Path, shorter: Sequence[Path]) -> None:
    """Checks what plans do not show: all steps must begin with the same values, and have the same
    loss and hyperparameters. Errors: StrategyError for a file that differs."""
    first = read_proto(longest)
    states = {slot.input for slot in _step_of(first, longest).slots}
    for file in shorter:
        other = read_proto(file)
        _step_of(other, file)
        values, other_values = (_values(proto, states) for proto in (first, other))
        odd = [
            name
            for name in values.keys() | other_values.keys()
            if name not in values or name not in other_values
        ]
        odd += [
            name
            for name in values.keys() & other_values.keys()
            if not _are_equal((values[name], longest.parent), (other_values[name], file.parent))
        ]
        ops = [
            [n.op_type for n in p.graph.node if n.name.startswith(_LOSS)] for p in (first, other)
        ]
        if odd or ops[0] != ops[1]:
            weights = sorted(name for name in odd if name in states)
            what = f"{weights[0]!r} has other values" if weights else "its hyperparameters differ"
            what = "its loss is another one" if not odd else what
            raise StrategyError(
                f"{file} is another training step than {longest}: {what}; write both of one model "
                "with the same options of `onnxpar grad`, but for the length in --dim"
            )


def _step_of(proto: onnx.ModelProto, file: Path) -> Step:
    """Returns the training step that a model is. Errors: StrategyError if it is none."""
    step = Step.of(proto)
    if step is None:
        raise StrategyError(f"--shorter: {file} is no training step; write one with `onnxpar grad`")
    return step


def _values(proto: onnx.ModelProto, states: Collection[str]) -> dict[str, onnx.TensorProto]:
    """Returns the first values of states, and the optimizer's constants, by name."""
    return {
        t.name: t for t in proto.graph.initializer if t.name in states or t.name.startswith(_UPDATE)
    }


def _are_equal(*tensors: tuple[onnx.TensorProto, Path]) -> bool:
    a, b = (numpy_helper.to_array(tensor, str(folder)) for tensor, folder in tensors)
    return a.dtype == b.dtype and np.array_equal(a, b)


def digests_beside(path: Path, shorter: Sequence[Path]) -> dict[str, Any]:
    """Returns the digests of the files of shorter steps, by their paths relative to the folder of
    the longest step."""
    return {os.path.relpath(file, path.parent): model_digest(file) for file in shorter}
