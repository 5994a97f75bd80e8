"""Cases of `verify`: folders of rank files, in which a file is broken. The command must end with 0,
1 or 2; an error is one line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import onnx
from equivalence.hand_split import verified, weights
from fuzz.configurations import damaged, spoiled
from fuzz.folders import instead
from fuzz.mutate import mutated
from fuzz.trial import Case, chance_of

MODELS = {"m.par": "m.onnx", "open.par": "open.onnx", "step.par": "step.onnx", "hand.par": "h.onnx"}
"""The folders, each with its model."""
_SIZES = ("9**9**9", "n" * 5000, "(" * 3000 + ")" * 3000, "1//0", "n<<99", "-n", "é", "n*n*n*n*n")
_HUGE = (1 << 31, 1 << 60, -1, 10**40, [1 << 60, 1 << 61], [[0, 1 << 60]], {"a": 1 << 60})


def make_hand_split(folder: Path) -> None:
    """Adds a folder that others made: `hand.par`, of the model `h.onnx`."""
    values = weights(up=(8, 16), down=(16, 8))
    model = (
        "g (float[4,8] x) => (float[4,8] y) { h = MatMul(x, up) r = Relu(h) y = MatMul(r, down) }"
    )
    rank = """g (float[4,8] x) => (float[4,8] y) {
        h = MatMul(x, up) r = Relu(h) p = MatMul(r, down) y = AllReduce(p) }"""
    ranks = [
        (
            rank,
            {"up": values["up"][:, 8 * r : 8 * r + 8], "down": values["down"][8 * r : 8 * r + 8]},
        )
        for r in range(2)
    ]
    ports = {
        "mesh": {"tp": 2}, "inputs": {"x": {"0": [[0, 4], [0, 4]]}}, "outputs": {"y": {}},
        "states": [["x", "y"]], "sizes": {}, "files": ["rank_0000.onnx", "rank_0001.onnx"],
        "ranges": {},
    }  # fmt: skip
    assert verified(folder / "made", (model, values), ranks, ports).ok
    (folder / "made" / "hand.par").rename(folder / "hand.par")
    (folder / "made" / "model.onnx").rename(folder / "h.onnx")


class Bundles:
    """The cases of one seed, of files that `make_base` and `make_hand_split` have made."""

    def __init__(self, seed: int, base: Path) -> None:
        self.seed, self.base = seed, base

    def __call__(self, number: int, folder: Path) -> Case:
        chance = chance_of("bundle", self.seed, number)
        par = chance.choice(tuple(MODELS))
        shutil.copytree(self.base / par, folder / par)
        shutil.copy(self.base / MODELS[par], folder)
        plan = next(f for f in (folder / par).iterdir() if f.name in ("plan.json", "ports.json"))
        files = [f for f in sorted((folder / par).iterdir()) if f.suffix != ".json"]
        _break(plan if chance.random() < 0.5 else chance.choice(files), chance)
        return Case(["verify", MODELS[par], par], lambda: "", statuses=(0, 1, 2))


def _break(file: Path, chance: random.Random) -> None:
    before = file.read_bytes()
    way = chance.random()
    if way < 0.1:
        chance.choice(instead)(file)
    elif file.suffix == ".json" and way < 0.9:
        data = json.loads(before)
        data = _with_odd_size(data, chance) if way < 0.4 else spoiled(data, chance)
        text = json.dumps(data)
        file.write_text("[" * 100_000 if chance.random() < 0.01 else text)
    elif file.suffix == ".onnx" and way < 0.9:
        file.write_bytes(mutated(onnx.load(file, load_external_data=False), chance))
    elif before:
        file.write_bytes(damaged(before, chance))


def _with_odd_size(data: object, chance: random.Random) -> object:
    """A number, a text or a list is something huge, negative, or an expression that is none."""
    places = [
        (holder, key)
        for holder, key in _places(data)
        if isinstance(holder[key], int | str | list)  # type: ignore[index]
    ]
    for holder, key in chance.sample(places, min(len(places), chance.choice((1, 2, 3)))):
        holder[key] = chance.choice((*_SIZES, *_HUGE))  # type: ignore[index]
    return data


def _places(data: object) -> list[tuple[object, object]]:
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [place for key, value in items for place in ((data, key), *_places(value))]
