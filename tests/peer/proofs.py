"""What the package knows of the suite: the rule, reasons and counts of each op, as proof.json."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from peer.cases import PeerCase, all_cases, runnable
from peer.forms import forms
from peer.outcome import GATHERED, REFUSED, SPLIT, Outcome

from onnxpar.errors import OnnxparError
from onnxpar.factors import OpFactors, analyse
from onnxpar.model import load
from onnxpar.rules.case import Case
from onnxpar.rules.oracle import Oracle
from onnxpar.rules.proof import prove
from onnxpar.rules.rule import registered, whole_ops

ROOT = Path(__file__).parents[2]
PROOF = ROOT / "onnxpar" / "rules" / "proof.json"
DOCS = ROOT / "docs" / "ops.md"


def proofs_of(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """The contents of proof.json behind a whole run."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        counts[outcome.op][outcome.kind] += 1
    found: dict[str, list[tuple[str, OpFactors]]] = defaultdict(list)
    for form in (f for c in all_cases() if not isinstance(r := runnable(c), str) for f in forms(r)):
        op = rule_of_case(form)
        if op is not None:
            found[op_name(op)].append((form.name, op))
    proofs = {
        name: {**_statement(ops), **{k: counts[name][k] for k in (SPLIT, GATHERED, REFUSED)}}
        for name, ops in found.items()
    }
    for name, cases in oracle_cases().items():
        if name not in proofs:
            ops = [("", Oracle(case).op) for case in cases]
            proofs[name] = {**_statement(ops), "oracle": sum(prove(c).splits for c in cases)}
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
