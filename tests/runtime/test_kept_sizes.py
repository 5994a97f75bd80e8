"""The error of a run whose feeds do not fit a state that an earlier run kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxpar
from onnxpar.base.errors import InputError
from onnxpar.runtime.session.threads import ThreadSession

MODEL = Path(__file__).parents[2] / "models" / "llama_decode.dynamo.dynamic.onnx"


@pytest.mark.slow
def test_the_error_names_the_kept_state_and_the_remedy(tmp_path: Path) -> None:
    plan = onnxpar.shard(MODEL, tmp_path / "d.par", devices=2, preset="tensor-parallel")
    empty = {name: np.zeros((3, 4, 0, 6), np.float32) for name, *_ in plan.states}
    with ThreadSession(tmp_path / "d.par") as session:
        session.run(["logits"], {"input_ids": np.ones((3, 1), int), **empty}, keep_states=True)
        one = {"input_ids": np.array([[1]])}
        with pytest.raises(InputError, match="state kept from an earlier run, has 3") as caught:
            session.run(["logits"], one, keep_states=True)
        assert "session.states.reset()" in str(caught.value)
        assert "different names" not in str(caught.value)
        session.states.reset()
        fed = {name: array[:1] for name, array in empty.items()}
        (logits,) = session.run(["logits"], {**one, **fed})
        assert logits.shape[0] == 1
