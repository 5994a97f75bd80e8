"""The part of a model and of its ranks that `--keep` writes: onnxruntime runs both, and they
differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from equivalence.test_mutants import FAULTS, LLAMA, SUM, attribute, changed
from onnx import numpy_helper

import onnxpar
from onnxpar.base.errors import InputError


def run(folder: Path) -> dict[str, np.ndarray]:
    """The results of a kept model for the kept values."""
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {}
    for path in (folder / "test_data_set_0").glob("input_*.pb"):
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        feeds[tensor.name] = numpy_helper.to_array(tensor)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def test_a_wrong_weight(tmp_path: Path) -> None:
    """Both ranks have the columns of a projection in another order."""
    change, ranks = FAULTS["columns of a weight in another order"]
    par = changed("tensor-parallel 2", tmp_path, change, ranks)
    result = onnxpar.verify(LLAMA, par, keep=tmp_path / "kept")
    assert not result.ok and f"kept    the part of the model in {tmp_path}/kept" in result.text()
    (whole,) = run(tmp_path / "kept" / "model").values()
    parts = run(tmp_path / "kept" / "ranks")
    assert len(parts) == 2
    joined = np.concatenate([parts[name] for name in sorted(parts)], -1)
    assert joined.shape == whole.shape and not np.allclose(joined, whole, atol=1e-2)


def test_a_wrong_reduction(tmp_path: Path) -> None:
    """The maximum of partial sums in the place of their sum, behind a collective; the sum itself
    is the model's."""
    par = changed("tensor-parallel 2", tmp_path, attribute(SUM, "op", "max"), [0, 1])
    result = onnxpar.verify(LLAMA, par, keep=tmp_path / "kept")
    assert not result.ok
    (whole,) = run(tmp_path / "kept" / "model").values()
    ranks = onnx.load(tmp_path / "kept" / "ranks" / "model.onnx")
    found = [node for node in ranks.graph.node if node.op_type == "Max"]
    first, second = run(tmp_path / "kept" / "ranks").values()
    assert found and np.array_equal(first, second) and not np.allclose(first, whole, atol=1e-2)
    for node in found:
        node.op_type = "Sum"
    onnx.save(ranks, tmp_path / "kept" / "ranks" / "model.onnx")
    first, second = run(tmp_path / "kept" / "ranks").values()
    np.testing.assert_allclose(first, whole, rtol=1e-4, atol=1e-5)


def test_nothing_is_kept_of_a_proof(tmp_path: Path) -> None:
    par = changed("tensor-parallel 2", tmp_path, lambda _: None, [])
    assert onnxpar.verify(LLAMA, par, keep=tmp_path / "kept").ok
    assert not (tmp_path / "kept").exists()


def test_a_folder_with_other_files_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("")
    par = changed("tensor-parallel 2", tmp_path, lambda _: None, [])
    with pytest.raises(InputError, match=r"other files, such as notes\.txt"):
        onnxpar.verify(LLAMA, par, keep=tmp_path / "kept")
