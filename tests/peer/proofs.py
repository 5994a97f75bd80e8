"""What the package knows of the suite: the rule, reasons and counts of each op, as proof.json."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from peer.cases import PeerCase, all_cases, runnable
from peer.forms import forms
from peer.outcome import GATHERED, REFUSED, SPLIT, Outcome

from onnxpar.base.errors import OnnxparError
from onnxpar.load.load import load
from onnxpar.report import op_table
from onnxpar.rules.rule import registered, whole_ops
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import OpFactors
from onnxpar.testing.case import Case
from onnxpar.testing.oracle import Oracle
from onnxpar.testing.proof import prove

ROOT = Path(__file__).parents[2]
PROOF = ROOT / "onnxpar" / "rules" / "proof.json"
DOCS = ROOT / "docs" / "reference" / "ops.md"
KINDS = (SPLIT, GATHERED, REFUSED)


def write_proofs(outcomes: Iterable[Outcome] | None) -> None:
    """Writes proof.json and docs/reference/ops.md after a whole run; with None, the rules of today
    beside the counts of the last run. An op that onnxruntime cannot run on this processor keeps its
    last proof."""
    old: dict[str, dict[str, Any]] = json.loads(PROOF.read_text())
    if outcomes is None:
        counts = {op: {k: proof.get(k, 0) for k in KINDS} for op, proof in old.items()}
    else:
        counts = counts_of(outcomes)
    PROOF.write_text(text_of(proofs_of(counts, old)))
    op_table.proofs.cache_clear()
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(op_table.markdown())


def counts_of(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """How many runs of each good kind an op has."""
    found: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        if outcome.kind in KINDS:
            found.setdefault(outcome.op, dict.fromkeys(KINDS, 0))[outcome.kind] += 1
    return found


def proofs_of(
    counts: Mapping[str, Mapping[str, int]], old: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The contents of proof.json, with these counts. `old` are those of before."""
    found: dict[str, list[tuple[str, OpFactors]]] = defaultdict(list)
    for case in all_cases():
        stamped = runnable(case)
        for form in () if isinstance(stamped, str) else forms(stamped):
            op = rule_of_case(form)
            if op is not None:
                found[op_name(op)].append((form.name, op))
    none = dict.fromkeys(KINDS, 0)
    proofs = {name: {**_statement(ops), **counts.get(name, none)} for name, ops in found.items()}
    for name, cases in oracle_cases().items():
        if name not in proofs:
            try:
                ops = [("", Oracle(case).op) for case in cases]
                proofs[name] = {**_statement(ops), "oracle": sum(prove(c).splits for c in cases)}
            except Fail as error:
                print(f"{name} keeps its last proof: {error}", file=sys.stderr)
                proofs[name] = old[name]
    return dict(sorted(proofs.items()))


def _statement(ops: list[tuple[str, OpFactors]]) -> dict[str, Any]:
    """The rule of the first case in which most factors split, and all reasons for whole ones."""
    case, op = max(ops, key=lambda entry: len(split_factors(entry[1])))
    whole: dict[str, str] = {}
    for _, each in ops:
        for factor, reason in each.whole.items():
            whole.setdefault(reason, factor)
    return {
        "case": case,
        "rule": op.rule.text(),
        "splits": split_factors(op),
        "whole": [f"{factor}: {reason}" for reason, factor in whole.items()],
    }


def split_factors(op: OpFactors) -> list[str]:
    """The factors of a node that may be split, in the order of its rule."""
    return list(dict.fromkeys(leaf.factor for leaf in op.leaves))


def rule_of_case(case: PeerCase) -> OpFactors | None:
    """The factors of the one node of a case; None where it has more, or is refused."""
    if len(case.model.graph.node) != 1:
        return None
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(case.model, path)
        try:
            model = load(path)
            ops = analyse(model.graph, model.states).ops
            ops = [op for op in ops if op.graph is model.graph]
        except (OnnxparError, AssertionError):  # the run reports it
            return None
    own = [op for op in ops if op.node.op == case.model.graph.node[0].op_type]
    return own[0] if len(ops) == 1 and own else None


def op_name(op: OpFactors) -> str:
    """The op with its domain, but for ONNX's own."""
    domain = op.node.domain
    return str(op.node.op) if domain in (None, "", "ai.onnx") else f"{domain}.{op.node.op}"


def oracle_cases() -> dict[str, list[Case]]:
    """The cases of the rule tests, by op."""
    found: dict[str, list[Case]] = defaultdict(list)
    for file in sorted((ROOT / "tests" / "rules").glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"peer_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
        for case in _cases_in(vars(module).values()):
            known = {*registered(), *whole_ops()}
            if (case.domain, case.op) in known:
                found[f"{case.domain}.{case.op}" if case.domain else case.op].append(case)
    return found


def _cases_in(values: Iterable[Any]) -> Iterator[Case]:
    for value in values:
        if isinstance(value, list):
            for entry in value:
                yield from [
                    e
                    for e in (entry if isinstance(entry, tuple) else [entry])
                    if isinstance(e, Case)
                ]


def text_of(proofs: Mapping[str, Any]) -> str:
    """proof.json, one op a line."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in proofs.items()) + "\n}\n"
    )
