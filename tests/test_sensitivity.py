"""Models that quantize as they run are judged by how far their own results move."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import TIMEOUT, options
from decoders import Decoder, build, empty_caches, feeds_of, with_options

from onnxpar import pipeline
from onnxpar.runtime.compare import TOLERANCES, Report, compare
from onnxpar.runtime.threads import ThreadSession

INT4 = Decoder("GroupQueryAttention", "int4")


def checked(decoder: Decoder, other: Decoder, folder: Path, ranks: int = 3) -> Report:
    """One decoder on ranks against another one unsplit, on a prompt of two sequences."""
    for name, each in (("whole", decoder), ("split", other)):
        onnx.save(build(each), folder / f"{name}.onnx")
    pipeline.shard(folder / "split.onnx", folder / "m.par", options(f"tensor-parallel {ranks}"))
    model = build(decoder)
    ids = np.random.default_rng(0).integers(0, 48, (2, 9))
    feeds = feeds_of(decoder, model, ids, 0) | empty_caches(decoder, model, 2)
    with ThreadSession(folder / "m.par", timeout=TIMEOUT) as session:
        return compare(folder / "whole.onnx", session, feeds)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_quantizes_as_it_runs(ranks: int, tmp_path: Path) -> None:
    report = checked(INT4, INT4, tmp_path, ranks)
    assert report.ok and report.moved, report.text()
    for row in report.rows:
        moved = report.moved[row.name]
        assert row.tolerance == max(TOLERANCES["float32"], 2 * moved)
    assert "Allowed is 2 times what those of the unsplit model move by" in report.text()


@pytest.mark.parametrize(
    "decoder", [Decoder("GroupQueryAttention"), with_options(INT4, level=0)], ids=str
)
def test_others_are_held_to_the_usual_tolerance(decoder: Decoder, tmp_path: Path) -> None:
    report = checked(decoder, decoder, tmp_path)
    assert report.ok and not report.moved, report.text()
    assert {row.tolerance for row in report.rows} == {TOLERANCES["float32"]}


def test_what_leaves_a_quantization_out_is_found(tmp_path: Path) -> None:
    """Ranks that compute with activations as they are."""
    report = checked(INT4, with_options(INT4, level=0), tmp_path)
    assert not report.ok and not report.rows[1].ok, report.text()
