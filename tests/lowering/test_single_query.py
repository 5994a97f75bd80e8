"""A single query of a causal Attention behind a cache sees all keys in onnxruntime, although ONNX's
definition hides those that come later; so it does where queries or keys are split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import TIMEOUT, check_outputs, run_unsplit

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession

SPLITS = {
    "queries": {"Q": [None, None, "tp", None]},
    "keys": {"K": [None, None, "tp", None], "V": [None, None, "tp", None]},
    "heads": {"Q": [None, "tp", None, None]},
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("has_cache", [True, False])
def test_lengths_of_queries(split: str, has_cache: bool, tmp_path: Path) -> None:
    cache = ", float[2,3,p,8] pk, float[2,3,p,8] pv" if has_cache else ""
    grown = ", float[2,3,t,8] nk, float[2,3,t,8] nv" if has_cache else ""
    results, more = ("Y, nk, nv", ",, pk, pv") if has_cache else ("Y", "")
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
        m (float[2,3,q,8] Q, float[2,3,k,8] K, float[2,3,k,8] V{cache})
        => (float[2,3,q,8] Y{grown}) {{ {results} = Attention<is_causal = 1>(Q, K, V{more}) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    strategy = {"mesh": {"tp": 2}, "tensors": SPLITS[split]}
    plan = onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", strategy=strategy)
    random = np.random.default_rng(0)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for queries, keys, past in (
            (1, 4, 3),
            (1, 1, 3),
            (1, 4, 0),
            (1, 6, 1),
            (2, 4, 3),
            (5, 5, 2),
        ):
            lengths = {"Q": queries, "K": keys, "V": keys}
            lengths |= {"pk": past, "pv": past} if has_cache else {}
            feeds = {
                name: random.standard_normal((2, 3, length, 8), np.float32)
                for name, length in lengths.items()
            }
            wanted = run_unsplit(tmp_path / "m.onnx", feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])
