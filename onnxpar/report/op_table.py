"""The table of ops (`onnxpar ops`): the rule of each, the factors that may be split, how many tests
the rule passes, and why other factors stay whole.

A rule depends on the node. `tests/peer/run.py --write` runs ONNX's own test suite, and writes rules
as text and counts of runs to `rules/proof.json`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

import onnx

import onnxpar.rules
import onnxpar.training.gradients
from onnxpar.graph.checker import newest_opset
from onnxpar.rules.fused_attention import DOMAIN as FUSED
from onnxpar.rules.rule import registered, whole_ops
from onnxpar.training.gradients.vjp import registered as gradients
from onnxpar.training.gradients.vjp import without as without_gradient

COUNTS = ("split", "gathered", "refused", "oracle")
NOTE = """\
split, gathered and refused count runs of ONNX's own test suite on ranks. Every run gave the
expected result: from shards (split), from inputs that were gathered before the op (gathered), or an
error that says why it cannot run (refused). oracle counts splits of single nodes that were compared
with onnxruntime, for ops without a case in the suite. gradient counts tests of the op's gradient,
against central differences or another program. The rule is that of one case; with other attributes
or shapes, it may differ."""
NOTATION = """\
A rule names the factors of each dimension of the inputs and, after `->`, of the outputs. Dimensions
with the same factor are split alike. `(h i)` is a dimension of two merged factors, `s0 + s1` one of
two segments, `1` one of a single element, `()` a scalar, and `_` an input or output without a
layout. In braces: if a `sum` factor is split, the results are partial sums (likewise `max`, `min`
and `prod`); `communicating` factors need collectives inside the op; `co-sharded` factors are split
by the same axes; `whole` factors are not split, and the last column says why."""


@dataclass(frozen=True)
class OpRow:
    """An op: `Op` of ONNX itself, `domain.Op` of other domains.

    rule      the rule of one test case as text; empty if there is no case
    splits    the factors of that rule that may be split
    counts    how many tests the rule passes, by the kinds in COUNTS
    whole     why some factors, or all tensors of the op, stay whole
    has_rule  True if the op has a sharding rule
    gradient  how many tests the gradient passes, or why there is none
    """

    op: str
    rule: str
    splits: tuple[str, ...]
    counts: Mapping[str, int]
    whole: tuple[str, ...]
    has_rule: bool
    gradient: str

    @property
    def is_lack(self) -> bool:
        """True if the op has neither a rule with a test case (or of a user) nor a reason for having
        none."""
        return not self.rule and not self.whole


def rows(pattern: str = "*") -> list[OpRow]:
    """Returns the ops whose name matches a glob: first ONNX's own, of the newest opset that
    onnxruntime loads; then ops of other domains that have a rule, or a reason for having none. The
    compiler's internal ops are left out."""
    known = {*registered(), *whole_ops()}
    others = {key for key in known if key[0] not in ("", FUSED)}
    ops = sorted({("", op) for op in standard_ops()} | others)
    table = [_row(domain, op) for domain, op in ops]
    return [r for r in table if fnmatchcase(r.op, pattern) or fnmatchcase(r.op, f"*.{pattern}")]


def standard_ops() -> list[str]:
    """Returns the names of ONNX's ops in the newest opset that onnxruntime loads, without
    deprecated ones."""
    newest: dict[str, Any] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= newest_opset():
            have = newest.get(schema.name)
            if have is None or have.since_version < schema.since_version:
                newest[schema.name] = schema
    return sorted(name for name, schema in newest.items() if not schema.deprecated)


def _row(domain: str, op: str) -> OpRow:
    name = f"{domain}.{op}" if domain else op
    proof = proofs().get(name, {})
    has_rule = (domain, op) in registered()
    reason = whole_ops().get((domain, op))
    return OpRow(
        name,
        (proof.get("rule") or _function(domain, op)) if has_rule else "",
        tuple(proof.get("splits", ())) if has_rule else (),
        {key: proof.get(key, 0) for key in COUNTS},
        tuple(proof.get("whole", ())) if has_rule else (reason,) if reason else (),
        has_rule,
        _gradient(domain, op),
    )


def _function(domain: str, op: str) -> str:
    """Returns `by MODULE` for an op whose rule is a user's, and so has no test case; empty for
    onnxpar's own rules."""
    function = registered()[domain, op]
    return "" if function.__module__.startswith("onnxpar.") else f"by {function.__module__}"


def _gradient(domain: str, op: str) -> str:
    name = f"{domain}.{op}" if domain else op
    if (domain, op) in gradients():
        return str(gradient_proofs().get(name, 0))
    reason = without_gradient().get((domain, op))
    if reason:
        return f"none: {reason}"
    if not domain:
        schema = onnx.defs.get_schema(op, newest_opset(), "")
        for what, formals in (("result", schema.outputs), ("operand", schema.inputs)):
            if not _has_floats(schema, formals):
                return f"none: no {what} is floating-point"
    return "not known"


def _has_floats(schema: onnx.defs.OpSchema, formals: Sequence[Any]) -> bool:
    """True if one of these formal operands or results of a schema may be floating-point."""
    types = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    kinds = [kind for f in formals for kind in types.get(f.type_str, {f.type_str})]
    return any("float" in kind or "double" in kind for kind in kinds)


@functools.cache
def gradient_proofs() -> Mapping[str, int]:
    """Returns how many tests each op's gradient passes, from `training/gradients/proof.json`."""
    text = (files(onnxpar.training.gradients) / "proof.json").read_text(encoding="utf-8")
    counts: Mapping[str, int] = json.loads(text)
    return counts


@functools.cache
def proofs() -> Mapping[str, Mapping[str, Any]]:
    """Returns the content of `rules/proof.json`, by op."""
    text = (files(onnxpar.rules) / "proof.json").read_text(encoding="utf-8")
    entries: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return entries


def to_json(table: Sequence[OpRow]) -> str:
    """Returns the rows as a JSON list, one per line."""
    return "[\n" + ",\n".join(json.dumps(asdict(row)) for row in table) + "\n]"


def lines(table: Sequence[OpRow]) -> Iterator[str]:
    """Yields the lines of the table as `onnxpar ops` prints them."""
    width = max([len(row.op) for row in table], default=2)
    heads = "  ".join(f"{c:>8}" for c in (*COUNTS, "gradient"))
    yield f"{'op':{width}}  {heads}  rule"
    for row in table:
        counts = "  ".join(f"{row.counts[c] or '-':>8}" for c in COUNTS)
        counts += f"  {row.gradient if row.gradient.isdigit() else '-':>8}"
        yield f"{row.op:{width}}  {counts}  {row.rule or '-'}"
        if row.splits:
            yield f"{'':{width}}  splits: {' '.join(row.splits)}"
        for reason in row.whole:
            yield f"{'':{width}}  whole: {reason}"
        if not row.gradient.isdigit():
            yield f"{'':{width}}  gradient: {row.gradient}"
    yield f"\n{len(table)} op{'s' * (len(table) != 1)}. {' '.join(NOTE.split())}"


def markdown() -> str:
    """Returns the content of docs/reference/ops.md, with all rows."""
    head = ("op", "rule", "splits", *COUNTS, "gradient", "whole, and why")
    written = "Written by `python tests/peer/run.py --write`."
    out = ["# Rules of all ops", "", NOTATION, "", NOTE, "", written, ""]
    out += [_cells(head), _cells(["---"] * len(head))]
    for row in rows():
        counts = [row.counts[c] or "" for c in COUNTS]
        rule = f"`{row.rule}`" if row.rule else ""
        whole = "; ".join(row.whole)
        cells = [f"`{row.op}`", rule, " ".join(row.splits), *counts, row.gradient, whole]
        out.append(_cells(cells))
    return "\n".join(out) + "\n"


def _cells(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"
