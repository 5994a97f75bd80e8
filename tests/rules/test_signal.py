"""Rules of Fourier transforms and of what is counted along a sequence."""

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from numpy import array

from onnxpar.rules.rule import rule_of
from onnxpar.testing.case import Case

N_GRAMS = {
    "mode": "TF",
    "min_gram_length": 1,
    "max_gram_length": 2,
    "max_skip_count": 1,
    "ngram_counts": [0, 3],
    "ngram_indexes": [0, 1, 2, 3, 4],
    "pool_int64s": [2, 3, 5, 2, 3, 5, 4],
}
WORDS = array([[2, 3, 5, 4], [5, 4, 2, 3], [2, 2, 3, 3]])
COMPLEX, REAL = (3, 6, 5, 2), (3, 6, 1)

CASES = [
    (Case("DFT", [COMPLEX, None, array(1)]), "d0 t1 d2 k, _, _ -> d0 f1 d2 o {whole: t1 f1 k o}"),
    (Case("DFT", [COMPLEX, None, array(0)]), "t0 d1 d2 k, _, _ -> f0 d1 d2 o {whole: t0 f0 k o}"),
    (Case("DFT", [REAL]), "d0 t1 k -> d0 f1 o {whole: t1 f1 k o}"),
    (
        Case("STFT", [(3, 32, 1), array(8), np.ones(16, np.float32), array(16)]),
        "b h0 k, _, _, _ -> b y0 f o {communicating: h0, co-sharded: h0 y0, whole: f k o}",
    ),
    (  # 5 frames that overlap
        Case("STFT", [(2, 21, 1), array(4), None, array(5)]),
        "b h0 k, _, _, _ -> b y0 f o {communicating: h0, co-sharded: h0 y0, whole: f k o}",
    ),
    (
        Case("STFT", [(2, 21, 1), array(4), None, array(5)], fed=[1]),
        "b t k, _, _, _ -> b s f o {whole: f k o t s}",
    ),
    (  # without the dimension of 1, as onnxruntime takes it
        Case("STFT", [(3, 32), array(8), np.ones(16, np.float32), array(16)]),
        "b h0, _, _, _ -> b y0 f o {communicating: h0, co-sharded: h0 y0, whole: f o}",
    ),
    (
        Case("STFT", [(2, 21), array(4), None, array(5)], fed=[1]),
        "b t, _, _, _ -> b s f o {whole: f o t s}",
    ),
    (Case("TfIdfVectorizer", [WORDS], N_GRAMS, fed=[0]), "b0 t -> b0 o {whole: t o}"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_tensors_that_no_definition_has_stay_whole():
    """A rule's text names three dimensions; a runtime may take more."""
    signal, result = (gs.Variable(n, np.float32, (2, 3, 8, 1)) for n in ("x", "y"))
    step, length = (gs.Constant(n, np.array(v)) for n, v in (("step", 2), ("length", 4)))
    node = gs.Node("STFT", "s", {}, [signal, step, gs.Variable.empty(), length], [result])
    found = rule_of(node)
    assert found.inputs[0] is not None and len(found.inputs[0]) == 4
    assert {str(v) for v in found.whole.values()} == {
        "'b h0 k, _, _, _ -> b y0 f o' gives 3 dimensions to 'x', which has 4"
    }
