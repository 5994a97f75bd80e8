"""How many small faults of written bundles does `onnxpar verify` refuse, and does it name the right
tensor?

    python tests/equivalence/mutants.py --count 500 --seed 0 [--model M] [--preset P] [--kind K]

Each mutant is one change of one bundle (`changes.py`). Its ranks also run in float64 with the
reference implementation of ONNX (`execution.py`), and are held against the unsplit model. What is
accepted but differs is a hole. Holes, crashes and refusals in another place are listed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import onnx
from changes import KINDS
from execution import Stuck
from quantized_models import int4_mlp, qdq_convolutions
from subjects import DRAWS, MANY_DRAWS, Mutant, Nothing, Subject
from training.steps import MLP, write_step

import onnxpar
from onnxpar.training import grad

MODELS = Path(__file__).parents[2] / "models"
RIGHT, ELSEWHERE, HOLE, CRASH = "right", "elsewhere", "HOLE", "CRASH"
EQUAL, NEEDLESS, UNUSABLE, ERROR = "equal", "needless", "unusable", "error"
OUTCOMES = (RIGHT, ELSEWHERE, ERROR, HOLE, CRASH, EQUAL, NEEDLESS, UNUSABLE)
"""The outcomes of a mutant.

right      refused at the nearest tensor of the model, or by an error that names the port
elsewhere  refused at another tensor
error      an error, though ranks can run
HOLE       accepted, and ranks differ from the model
CRASH      an exception that is no error of onnxpar
equal      accepted, and ranks are equal to the model on many draws
needless   refused, and ranks are equal to the model on some draws
unusable   another error, and ranks cannot run, either
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    outcome: str
    said: str
    differs: str
    seconds: float


def mutants(subject: Subject, count: int, seed: int, kinds: Sequence[str]) -> Iterator[Mutant]:
    """Draws mutants of a bundle, of all kinds in turn; a kind that finds nothing is left out."""
    left = [*kinds]
    Random(f"{seed} {subject.model.name} {subject.layout}").shuffle(left)
    number = 0
    while number < count and left:
        for kind in [*left]:
            mutant = _drawn(subject, kind, Random(f"{seed} {number} {kind}"))
            number += 1
            if mutant is None:
                left.remove(kind)
                continue
            yield mutant
            if number >= count:
                return


def _drawn(subject: Subject, kind: str, random: Random) -> Mutant | None:
    for _ in range(12):
        mutant = Mutant(subject, kind)
        try:
            KINDS[kind](random, mutant)
        except (Nothing, ValueError, OverflowError):
            continue
        if mutant.changes:
            return mutant
    return None


def judge(mutant: Mutant) -> Outcome:
    """Verifies a mutant, runs its ranks, and says what became of it."""
    began, said, outcome = time.perf_counter(), "", ""
    result = None
    try:
        result = mutant.subject.verify(mutant)
        said = "accepted" if result.ok else _said(result)
    except onnxpar.OnnxparError as error:
        said = f"{type(error).__name__}: {error}"
    except Exception:  # the outcome that is looked for
        outcome, said = CRASH, traceback.format_exc(limit=-3)
    seconds = time.perf_counter() - began
    is_accepted = result is not None and result.ok
    differs = mutant.subject.differs(mutant, MANY_DRAWS if is_accepted else DRAWS)
    if outcome:
        pass
    elif result is None:
        outcome = RIGHT if _names(said, mutant) else ERROR if not differs else UNUSABLE
    elif result.ok:
        outcome = HOLE if differs else EQUAL
    elif not differs:
        outcome = NEEDLESS
    else:
        outcome = RIGHT if _is_right(result, mutant) else ELSEWHERE
    return Outcome(mutant, outcome, said, differs, seconds)


def _names(said: str, mutant: Mutant) -> bool:
    return any(repr(name) in said for name in (*mutant.ports, *mutant.calls))


def _said(result: onnxpar.Verification) -> str:
    first = result.failures[0]
    return f"{first.kind} {first.tensor}: {first.text} | {' | '.join(first.details)}"


def _is_right(result: onnxpar.Verification, mutant: Mutant) -> bool:
    """True if the first failure names a tensor, or a collective, at the change."""
    first = result.failures[0]
    if first.kind == "order":
        return any(name in first.text for name in mutant.calls)
    return first.tensor in mutant.subject.nearest(mutant) or any(
        mutant.subject.depends(first.tensor, port) for port in mutant.inputs
    )


def table(outcomes: Sequence[tuple[str, str]]) -> str:
    """Counts of outcomes by a name, as a table."""
    rows: dict[str, Counter[str]] = {}
    for name, outcome in outcomes:
        rows.setdefault(name, Counter())[outcome] += 1
    rows = dict(sorted(rows.items()))
    rows["all"] = sum(rows.values(), Counter())
    lines = [f"| | mutants | {' | '.join(OUTCOMES)} | score |", "|---|" + "---|" * 10]
    for name, counts in rows.items():
        changing = sum(counts[o] for o in (RIGHT, ELSEWHERE, ERROR, HOLE, CRASH))
        score = f"{100 * counts[RIGHT] / changing:.1f} %" if changing else ""
        cells = " | ".join(str(counts[o] or "") for o in OUTCOMES)
        lines.append(f"| {name} | {sum(counts.values())} | {cells} | {score} |")
    return "\n".join(lines)


STATIC = (
    "bert", "gpt2", "llama", "llama_decode", "mixtral", "t5", "resnet", "dlrm", "mobilenet", "vit",
    "falcon", "unet", "gpt_neox", "llama_heads9",
)  # fmt: skip
OPEN = ["bert", "gpt2", "llama", "t5"]
PRESETS = ("tensor-parallel 2", "hybrid dp=2,tp=2", "sequence-parallel 2", "context-parallel 2",
           "data-parallel 2", "tensor-parallel 3")  # fmt: skip
HALOS = (("tp=2", [None, None, "tp", None]), ("a=2,b=2", [None, None, "a", "b"]))
"""Meshes over which images are split along space."""
STEP_PRESETS = ("zero1 2", "zero3 3", "hybrid dp=2,tp=2", "tensor-parallel 2")


Source = tuple[Path, str, dict[str, Any]]
"""A model, the layout of its bundle, and other options."""


def subjects(folder: Path, model: str, preset: str) -> Iterator[Source]:
    """Yields the models and presets whose names have these texts."""
    pairs = [(MODELS / f"{n}.dynamo.static.onnx", p) for n in STATIC for p in PRESETS]
    pairs += [(MODELS / f"{n}.dynamo.dynamic.onnx", p) for n in OPEN for p in PRESETS[:2]]
    written = {
        "int4": lambda path: onnx.save(int4_mlp(4), path),
        "qdq": lambda path: onnx.save(qdq_convolutions(4), path),
    }
    for name, write in written.items():
        if model in name:
            write(folder / f"{name}.onnx")
        pairs += [(folder / f"{name}.onnx", p) for p in ("data-parallel 2", "tensor-parallel 2")]
    steps = {"mlp.step": MODELS / "mlp", **{
        f"{n}.step": MODELS / f"{n}.legacy.training.onnx" for n in ("llama", "gpt2", "bert")
    }}  # fmt: skip
    for name, source in steps.items():
        path = folder / name
        for layout in STEP_PRESETS:
            if model in name and preset in layout:
                if not path.exists():
                    _write_step(source, path, folder)
                yield path, layout, {}
    others = [(path, layout, {}) for path, layout in pairs]
    others += [
        (MODELS / f"{name}.dynamo.static.onnx", layout, {"strategy": {"tensors": {port: rows}}})
        for name, port in {"resnet": "pixel_values", "unet": "sample"}.items()
        for layout, rows in HALOS
    ]
    others.append((MODELS / "lstm.legacy.training.onnx", "data-parallel 2", {}))
    for path, layout, how in others:
        if model in path.name and preset in layout:
            yield path, layout, how


def _share(model: Path) -> float:
    """How many mutants a model gets: fewer if each takes seconds."""
    is_slow = model.name.startswith("mixtral") or model.name.endswith(".step")
    return 0.1 if is_slow and model.name != "mlp.step" else 1.0


def _write_step(source: Path, path: Path, folder: Path) -> None:
    if source.exists():
        grad(source, path, loss="softmax-cross-entropy", optimizer="adamw")
    else:
        write_step(MLP, folder, optimizer="adamw").rename(path)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="mutants in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="", help="only models with this in their names")
    parser.add_argument("--preset", default="", help="only presets with this in their names")
    parser.add_argument("--kind", default="", help="only kinds with this in their names")
    parser.add_argument("--show", default="", help="list mutants with this outcome, too")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="onnxpar-mutants-"))
    try:
        return run(given, folder)
    finally:
        shutil.rmtree(folder)


def run(given: argparse.Namespace, folder: Path) -> int:
    """Runs mutants of all bundles, in a drawn order, and prints tables, also if it is ended before.
    Returns 1 if there is a hole, or a crash."""
    chosen = list(subjects(folder, given.model, given.preset))
    Random(given.seed).shuffle(chosen)
    kinds = [kind for kind in KINDS if given.kind in kind]
    found: list[tuple[str, str, str]] = []
    try:
        _run_all(given, chosen, kinds, folder, found)
    finally:
        print(table([(kind, outcome) for kind, _, outcome in found]))
        print(table([(bundle, outcome) for _, bundle, outcome in found]))
    return int(any(outcome in (HOLE, CRASH) for _, _, outcome in found))


def _run_all(
    given: argparse.Namespace, chosen: Sequence[Source], kinds: Sequence[str],
    folder: Path, found: list[tuple[str, str, str]],
) -> None:  # fmt: skip
    """Adds the kind, the bundle and the outcome of each mutant to `found`."""
    began = time.monotonic()
    for number, (model, layout, how) in enumerate(chosen):
        try:
            place = folder / f"{number}"
            subject = Subject(model, layout, place, **how)
            refusal = subject.refusal()
        except (onnxpar.StrategyError, Stuck) as error:
            refusal = f"{error}"
        if refusal:
            print(f"{model.name}, {layout} has no mutants: {refusal:.200}")
            continue
        left = sum(_share(path) for path, _, _ in chosen[number:])
        each = round((given.count - len(found)) * _share(model) / left)
        name = model.name.removesuffix(".onnx")
        for mutant in mutants(subject, each, given.seed, kinds):
            outcome = judge(mutant)
            found.append((mutant.kind, f"{name}, {layout}", outcome.outcome))
            if outcome.outcome in (HOLE, CRASH, ERROR, ELSEWHERE) or outcome.outcome == given.show:
                print(f"{outcome.outcome}: {name}, {layout}: {mutant.kind}: {mutant.text}")
                print(f"  verify: {outcome.said:.600}\n  ranks:  {outcome.differs:.200}")
        counts = Counter(outcome for _, _, outcome in found)
        line = ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])
        spent = f"{len(found)} of {given.count}, {time.monotonic() - began:.0f} s"
        print(f"[{spent}] {name}, {layout}: {line}", flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
