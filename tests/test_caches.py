"""Decoders whose caches stay on their ranks give what the unsplit loop gives, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_outputs, options, relative_error
from decoders import (
    VOCABULARY,
    Decoder,
    build,
    empty_caches,
    feeds_of,
    pairs_of,
)

from onnxpar import pipeline
from onnxpar.plan import Plan
from onnxpar.runtime.threads import ThreadSession

TOKENS = 32
PROMPTS = ((1, 3, 5), (2, 4), (5, 1))
"""Batch and tokens of the prompt, of one request also of a prompt after the first one's tokens:
GroupQueryAttention takes such only alone."""
GQA = "GroupQueryAttention"
DECODERS = [
    Decoder(GQA),
    Decoder(GQA, "float16"),
    Decoder(GQA, shared=4, options={"packed": False, "positions": True}),
    Decoder(GQA, options={"lengths": "vector"}),
    Decoder(GQA, options={"lengths": "column"}),
    Decoder(GQA, length=48),
]


class Loop:
    """The unsplit model and the ranks side by side, one request after the other."""

    def __init__(self, decoder: Decoder, folder: Path, ranks: int) -> None:
        self.decoder, self.model = decoder, build(decoder)
        file = folder / "decoder.onnx"
        onnx.save(self.model, file)
        self.pairs = pairs_of(self.model)
        how = options(f"tensor-parallel {ranks}")
        self.plan: Plan = pipeline.shard(file, folder / "m.par", how)
        self.folder = folder / "m.par"
        quiet = ort.SessionOptions()
        quiet.log_severity_level = 3
        self.whole = ort.InferenceSession(str(file), quiet, ["CPUExecutionProvider"])
        self.tolerance = 5e-3 if decoder.weights == "float16" else 1e-5

    def check(self, wanted: np.ndarray, got: np.ndarray, what: str) -> None:
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, (what, got.shape)
        error = relative_error(got, wanted)
        assert error <= self.tolerance, f"{what}: {error:.1e}"

    def request(self, session: ThreadSession, batch: int, prompts: tuple[int, ...]) -> None:
        """Prompts with tokens between and behind them; caches are fed to the first run alone."""
        random = np.random.default_rng(batch)
        caches = empty_caches(self.decoder, self.model, batch)
        fed, before = dict(caches), 0
        for count, seq in enumerate(prompts):
            ids = random.integers(0, VOCABULARY, (batch, seq))
            for step in range(TOKENS // len(prompts)):
                feeds = feeds_of(self.decoder, self.model, ids, before)
                names = ["logits", *self.pairs.values()]
                wanted = dict(zip(names, self.whole.run(names, feeds | caches), strict=True))
                (logits,) = session.run(None, feeds | fed, keep_states=True)
                self.check(wanted["logits"], logits, f"prompt {count}, step {step}")
                caches, fed = {i: wanted[o] for i, o in self.pairs.items()}, {}
                before += ids.shape[1]
                ids = wanted["logits"][:, -1:].argmax(-1)
        for name, wanted in caches.items():
            self.check(wanted, session.states.read(name), name)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_a_decoder_keeps_its_caches_on_the_ranks(
    decoder: Decoder, ranks: int, tmp_path: Path
) -> None:
    loop = Loop(decoder, tmp_path, ranks)
    assert dict(loop.plan.states) == loop.pairs
    gathered = [c.tensor for c in loop.plan.collectives if "past" in c.tensor or "pres" in c.tensor]
    assert not gathered, "caches travel"
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        for batch, *prompts in PROMPTS:
            session.states.reset()
            loop.request(session, batch, tuple(prompts))


def test_what_a_run_returns_is_whole(tmp_path: Path) -> None:
    """Keys of a length that the values of an operand decide, returned and not kept."""
    decoder = Decoder(GQA)
    loop = Loop(decoder, tmp_path, 2)
    ids = np.arange(10).reshape(2, 5)
    feeds = feeds_of(decoder, loop.model, ids, 0) | empty_caches(decoder, loop.model, 2)
    wanted = loop.whole.run(None, feeds)
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        check_outputs(session.run(None, feeds), wanted, [p.name for p in loop.plan.outputs])
