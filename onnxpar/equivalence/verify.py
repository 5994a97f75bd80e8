"""Proves that the ranks of a folder compute a model."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.errors import DamagedError, ModelError
from onnxpar.equivalence.fold import drop_unneeded, fold
from onnxpar.equivalence.held import Held
from onnxpar.equivalence.layouts import MeshReader, families_of
from onnxpar.equivalence.order import Disorder, check_order
from onnxpar.equivalence.program import Program, read_program
from onnxpar.equivalence.ranks import Ranks
from onnxpar.equivalence.spans import Families, Family
from onnxpar.equivalence.verification import Failure, Verification
from onnxpar.equivalence.walk import Walk, key_of


def verify(model: Path | str, folder: Path | str, seed: int = 0) -> Verification:
    """Proves that the ranks of a sharded folder compute a model, or says where the proof ends.

    model   the model, or the training step, that was sharded
    folder  what `onnxpar shard` wrote
    seed    of the values on which nodes are compared that no lemma proves

    Nothing of the compiler takes part: the model, the files of ranks, and of plan.json the mesh and
    the layouts of ports are read. Errors: ModelError if a file cannot be read."""
    began = time.perf_counter()
    path, par = Path(model), Path(folder)
    plan = _plan(par)
    fed = {port["name"] for port in plan["inputs"]}
    program = read_program(path, fed)
    drop_unneeded(program, program.outputs)
    fold(program)
    proved: dict[str, str] = {}
    failures: list[Failure] = []
    left, collectives, compared = [*program.outputs], 0, 0
    for suffix in _programs(par):
        files = [par / f"rank_{rank:04d}.{suffix}" for rank in range(_ranks(plan))]
        ranks = Ranks([read_program(file, fed) for file in files])
        own = [name for name in left if name in ranks.programs[0].outputs]
        left = [name for name in left if name not in own]
        part = replace(program, nodes=[*program.nodes], outputs=own)
        drop_unneeded(part, own)
        proof = _Proof(part, ranks, plan)
        failures += proof.run()
        proved |= proof.walk.proved
        collectives += proof.collectives
        compared += proof.walk.compared
    failures += [Failure("output", name, "no file of ranks computes it") for name in left]
    return Verification(
        model=str(model), folder=str(folder), outputs=tuple(program.outputs), ranks=_ranks(plan),
        nodes=len(program.nodes), proved=dict(Counter(proved.values())), collectives=collectives,
        compared=compared, failures=tuple(failures), seconds=time.perf_counter() - began,
    )  # fmt: skip


def _programs(folder: Path) -> list[str]:
    """The ends of the names of rank 0's files with a program: `onnx`, `evaluation.onnx`. Errors:
    ModelError if there is none."""
    names = sorted(p.name for p in folder.glob("rank_0000.*onnx") if not p.name.endswith("states.onnx"))
    if not names:
        raise ModelError(f"{folder} has no rank_0000.onnx")
    return sorted((name.removeprefix("rank_0000.") for name in names), key=len)


def _plan(folder: Path) -> Mapping[str, Any]:
    try:
        plan = json.loads((folder / "plan.json").read_text())
    except OSError as error:
        raise ModelError(f"{folder}/plan.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{folder}/plan.json is not JSON: {error}") from None
    if not isinstance(plan, dict):
        raise DamagedError(f"{folder}/plan.json is not an object")
    return plan


MOST_RANKS = 65536


def _ranks(plan: Mapping[str, Any]) -> int:
    try:
        count = MeshReader(plan["mesh"]).ranks
    except (KeyError, TypeError, ValueError):
        raise DamagedError("plan.json has no mesh") from None
    if not 0 < count <= MOST_RANKS:
        raise DamagedError(f"plan.json has a mesh of {count} ranks")
    return count


class _Proof:
    def __init__(self, program: Program, ranks: Ranks, plan: Mapping[str, Any]) -> None:
        self.program, self.ranks, self.plan = program, ranks, plan
        self.families = Families(ranks.size)
        self.mesh = MeshReader(plan["mesh"])
        copies: dict[str, list[str]] = {}
        for weight in plan.get("weights", ()):
            copies.setdefault(weight["name"], []).append(weight["tensor"])
            self._layout(weight)
        self.collectives = 0
        self.walk = Walk(program, ranks, self.families, copies)

    def run(self) -> list[Failure]:
        failures = []
        try:
            self.collectives = check_order(self.ranks.programs)
        except Disorder as error:
            failures.append(Failure("order", "", str(error)))
        for rank in self.ranks.programs:
            fold(rank, keeps=True)
        ports = {port["name"]: port for port in (*self.plan["inputs"], *self.plan["outputs"])}
        for port in self.plan["outputs"]:
            self._layout(port)
        for port in self.plan["inputs"]:
            dims = self._layout(port)
            if dims is not None:
                self.walk.hold(Held(port["name"], port["name"], dims))
        self.walk.run()
        for name in self.program.outputs:
            port = ports.get(name)
            failure = self._check_output(name, port)
            if failure is not None:
                failures.append(failure)
        for pair in self.plan.get("states", ()):
            if pair["output"] not in self.program.outputs:
                continue
            if not self._is_carried(ports[pair["input"]], ports[pair["output"]]):
                text = "the ranks keep other positions of it than they read in the next run"
                failures.append(Failure("state", pair["output"], text))
        return failures

    def _is_carried(self, source: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
        """True if ranks read a state at the positions that they kept of it; a dimension that grows
        must be whole."""
        first, second = self._layout(source), self._layout(result)
        if first is None or second is None or len(first) != len(second):
            return first is second
        sizes = zip(first, second, source["shape"], result["shape"], strict=True)
        return all(
            f is g if n == m else f.is_whole(n) and g.is_whole(m) for f, g, n, m in sizes
        )

    def _layout(self, port: Mapping[str, Any]) -> tuple[Family, ...] | None:
        layout = port.get("layout")
        return None if layout is None else tuple(families_of(layout, self.mesh, self.families))

    def _check_output(self, name: str, port: Mapping[str, Any] | None) -> Failure | None:
        """An output must be related, in the layout of its port, and ranks must hold all of it."""
        held = self.walk.relations.of(name, name)
        dims = None if port is None else self._layout(port)
        if name in self.program.constants and dims is not None:
            held = held or self.walk.constant(name, name)
        if not held:
            return self._first_refusal(name)
        if dims is None:
            return Failure("output", name, "plan.json has no layout for it")
        if not any(h.dims == dims and not h.partial for h in held):
            what = "a part of a sum" if all(h.partial for h in held) else "other positions of it"
            return Failure("output", name, f"ranks have {what} than plan.json says")
        shape = self.walk.shape(name)
        if shape is None or not covers(dims, shape, self.ranks.size):
            return Failure("output", name, "no rank has some of its elements")
        return None

    def _first_refusal(self, name: str) -> Failure:
        """The first node before a tensor that is not proved."""
        makers = {t: n for n in self.program.nodes for t in n.outputs}
        todo, seen, before = [name], set[str](), set[str]()
        while todo:
            term = todo.pop()
            node = makers.get(term)
            if term in seen or node is None:
                continue
            seen.add(term)
            key = key_of(node)
            if key in self.walk.refused:
                before.add(key)
            todo += node.inputs
        for node in self.program.nodes:
            key = key_of(node)
            if key in before:
                return self.walk.failure(key)
        return Failure("output", name, "no tensor of ranks is related to it")


def covers(dims: Sequence[Family], shape: Sequence[int], ranks: int) -> bool:
    """True if ranks together hold each element of a tensor."""
    pieces = [_pieces(family, size) for family, size in zip(dims, shape, strict=True)]
    held = np.zeros([count for _, count in pieces], bool)
    for rank in range(ranks):
        own = [of_rank[rank] for of_rank, _ in pieces]
        held[np.ix_(*own) if own else ()] = True
    return bool(held.all()) or 0 in shape


def _pieces(family: Family, size: int) -> tuple[list[np.ndarray], int]:
    """Divides a dimension into pieces that each rank holds wholly or not at all: for each rank its
    pieces, and the number of all."""
    codes = np.zeros(size, np.int64)
    for span in {id(s): s for s in family.spans}.values():
        member = np.zeros(size, np.int64)
        member[span] = 1
        _, codes = np.unique(codes * 2 + member, return_inverse=True)
    count = int(codes.max()) + 1 if size else 1
    return [np.unique(codes[span]) for span in family.spans], count
