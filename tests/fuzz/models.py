"""Cases of mutated models: what a command says of each, held against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from fuzz.corpus import CORPUS, DATA, LARGE, found_models
from fuzz.mutate import mutated
from fuzz.sessions import random_feeds
from fuzz.trial import Case, chance_of, refusal

from onnxpar.base.errors import OnnxparError
from onnxpar.graph.shapes_by_onnxruntime import REFUSED
from onnxpar.report.compare import compare
from onnxpar.runtime.session.threads import ThreadSession

WAYS = (
    ("--devices", "2", "--preset", "data-parallel"),
    ("--devices", "2"),
    ("--devices", "2", "--preset", "tensor-parallel"),
    ("--mesh", "dp=2,tp=2", "--preset", "hybrid"),
)
TINY = tuple(name for name in CORPUS if name not in LARGE)


class Models:
    """The cases of one seed."""

    def __init__(self, seed: int, share_of_large: float = 0.06) -> None:
        self.seed, self.share_of_large = seed, share_of_large

    def __call__(self, number: int, folder: Path) -> Case:
        chance = chance_of("model", self.seed, number)
        is_large = chance.random() < self.share_of_large
        name = chance.choice(LARGE if is_large else TINY)
        seeds = found_models() if not is_large and chance.random() < 0.25 else []
        seed = chance.choice(seeds) if seeds else CORPUS[name]()
        model = folder / "m.onnx"
        model.write_bytes(mutated(seed, chance))
        return case_of(model, chance.choice(WAYS[:1] if is_large else WAYS), is_large)


def case_of(model: Path, way: tuple[str, ...], only_plan: bool = False) -> Case:
    """A command for a model file that is in the working directory alone."""
    (model.parent / DATA).write_bytes(np.arange(68, dtype=np.float32).tobytes())
    par = model.parent / "m.par"
    command = ["plan", "m.onnx"] if only_plan else ["shard", "m.onnx", "-o", "m.par"]
    judge = partial(_judge, model, None if only_plan else par)
    return Case([*command, *way], judge, ("model", model))


def _judge(model: Path, par: Path | None) -> str:
    """What is wrong with a plan that was made: the runtime does not load the model, or it computes
    something else."""
    why = refusal(model)
    if why:
        return f"accepted: onnxruntime does not load it\n{why}"
    if par is None:
        return ""
    try:
        feeds = random_feeds(par)
    except OnnxparError:  # of a type that onnxruntime has, but NumPy lacks
        feeds = None
    if feeds is None or not _runs(model, feeds):
        return ""
    try:
        with ThreadSession(par, timeout=20.0) as session:
            found = compare(model, session, feeds)
    except OnnxparError as error:
        return f"ranks fail where the unsplit model runs: {error}"
    return "" if found.ok else f"wrong: {found.text()}"


def _runs(model: Path, feeds: Mapping[str, Any]) -> bool:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(str(model), options, ["CPUExecutionProvider"])
        session.run(None, dict(feeds))
    except REFUSED:
        return False
    return True
