"""Every op of the installed onnx has a rule or a reason; the table and its file are up to date."""

from __future__ import annotations

import json

import pytest
from peer.cases import all_cases, runnable
from peer.forms import forms
from peer.proofs import DOCS, op_name, rule_of_case, split_factors

from onnxpar.cli.command_line import main
from onnxpar.report import op_table
from onnxpar.rules.rule import registered, whole_ops

RENEW = "run: python tests/peer/run.py --write-rules"


def test_every_op_has_a_rule_or_a_reason() -> None:
    lacking = [row.op for row in op_table.rows() if row.is_lack]
    assert not lacking


def test_no_op_has_both() -> None:
    assert not registered().keys() & whole_ops().keys()


def test_no_reason_is_for_an_op_that_there_is_not() -> None:
    own = {op for domain, op in whole_ops() if not domain}
    assert own <= set(op_table.standard_ops())


def test_the_document_is_the_table() -> None:
    assert DOCS.read_text() == op_table.markdown(), RENEW


@pytest.mark.slow
@pytest.mark.peer
def test_the_rules_in_the_table_are_those_of_today() -> None:
    cases = {case.name: case for case in all_cases()}
    for name, proof in op_table.proofs().items():
        case = cases.get(proof["case"].removesuffix(" with constants"))
        if case is None:
            continue
        found = runnable(case)
        assert not isinstance(found, str), found
        form = next(f for f in forms(found) if f.name == proof["case"])
        op = rule_of_case(form)
        assert op is not None and op_name(op) == name
        now = (op.rule.text(), split_factors(op))
        assert now == (proof["rule"], proof["splits"]), RENEW


def test_ops_prints_rule_counts_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "NonZero"]) == 0
    shown = capsys.readouterr().out
    assert "the size of its results is data-dependent" in shown
    assert main(["ops", "Gemm"]) == 0
    assert "m k, k n" in capsys.readouterr().out


def test_ops_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--json", "Mat*"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["op"] for row in rows][:2] == ["MatMul", "MatMulInteger"]
    assert rows[0]["counts"]["split"] > 0 and rows[0]["counts"]["refused"] == 0


def test_ops_of_no_such_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "MatMull"]) == 2
    assert "matches no op" in capsys.readouterr().err


def test_one_op_is_counted_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "Reshape"]) == 0
    assert "\n1 op. " in capsys.readouterr().out
    assert main(["ops", "Reduce*"]) == 0
    assert " ops. " in capsys.readouterr().out
