"""onnxpar beside onnxruntime-genai and onnxruntime at generating text, in rounds in which all take
turns.

    python tests/bench/bench_language_models.py --models DIR --peers-python PYTHON
        [--shapes 0.2B 0.5B 1.1B] [--dtypes fp32 int4] [--systems genai onnxpar ...] [--ranks 2]
        [--only generate serve] [--batches 1 4 16] [--prompts 32 512] [--new 32] [--requests 3]
        [--rounds 5] [--quick] [--json FILE] [--plot FILE.svg]

PYTHON has torch, transformers and onnxruntime-genai 0.18; it makes the models, which stay in DIR,
and runs the systems of that package. onnxpar runs over ranks of one thread, the others with as many
threads. Each system is a process of its own, and sleeps while another one is measured; where memory
is scarce, it ends after its turn.

generate: a batch of prompts of one length. `first` is the time until all texts have a token, `its
mean` that until a text has one: onnxpar reads long prompts one after the other.
A further token of all texts takes `ms a token`, while all run.
serve: 16 clients send requests one after the other, with prompts of 16 to 256 tokens and answers of
16 to 64. genai answers them one after the other, genai-engine, its Engine, in static batches of 16.
Columns with an x say how many times faster than the first system; `same` is the share of texts with
the same first token; `others` are the cores that other processes used. Rounds in which those were
less than a tenth of a core count, and at least the quietest half.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import language_model_report as report
from bench.language_model_folders import LAST, SHAPES, SPECIAL, WHOLE, Shape
from bench.language_model_workers import Worker, lacks, version
from bench.peer_report import machine

import onnxpar

GENERATE, SERVE = "generate", "serve"
SYSTEMS = {
    "genai": (GENERATE, SERVE),
    "genai-engine": (SERVE,),
    "onnxruntime": (GENERATE,),
    "onnxpar": (GENERATE, SERVE),
}
"""What is measured of each system; the first one is the base."""
CLIENTS = 16
PROMPTS, ANSWERS = (16, 256), (16, 64)
"""Fewest and most tokens of requests."""
SPARE = 64
"""Tokens of each text of the largest batch for which caches have more room: texts that begin early
go on until the last one is done."""
ENOUGH = 4
"""Texts from which on systems must agree."""
COPIES = 2.5
"""What a system may hold, in files of its weights."""
Answers = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Model:
    """A model in its folders, and over ranks."""

    name: str
    shape: Shape
    folder: Path
    par: Path

    @classmethod
    def of(cls, shape: str, dtype: str, args: argparse.Namespace) -> Model:
        """Makes the folders that are missing. Errors: CalledProcessError."""
        folder = args.models / f"{shape}-{dtype}"
        args.models.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            print(f"making {folder}", file=sys.stderr)
            program = Path(__file__).with_name("language_model_folders.py")
            with folder.with_suffix(".log").open("w") as log:
                command = [args.peers_python, program, shape, dtype, folder]
                subprocess.run(command, stdout=log, stderr=log, check=True)
        par = args.models / f"{shape}-{dtype}-{args.ranks}.par"
        onnxpar.shard(folder / WHOLE, par, devices=args.ranks)
        return cls(f"{shape} {dtype}", SHAPES[shape], folder, par)

    def is_small(self, systems: int) -> bool:
        """True if so many systems can hold it at once."""
        size = (self.folder / WHOLE / "model.onnx.data").stat().st_size
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return systems * COPIES * size < free

    def texts(self, draw: random.Random, lengths: Sequence[int]) -> list[list[int]]:
        """Random prompts, without special tokens."""
        return [draw.choices(range(len(SPECIAL), self.shape.vocabulary), k=n) for n in lengths]

    def workers(self, args: argparse.Namespace) -> Iterator[Worker]:
        """The systems that run it."""
        names = [name for name in SYSTEMS if name in args.systems]
        tokens = max(args.batches) * (max(args.prompts) + args.new + SPARE)
        tokens = max(tokens, CLIENTS * (PROMPTS[1] + ANSWERS[1]) if SERVE in args.only else 0)
        last = {"folder": str(self.folder / LAST), "threads": args.ranks}
        whole = {"folder": str(self.folder / WHOLE), "threads": args.ranks, "batch": CLIENTS}
        paged = {
            "par": str(self.par),
            "kv_memory": self.shape.cache_bytes(tokens) // min(args.ranks, self.shape.key_heads),
            "threads": 1,
        }
        made = {
            "genai": (args.peers_python, "Genai", last),
            "genai-engine": (args.peers_python, "GenaiEngine", whole),
            "onnxruntime": (sys.executable, "Onnxruntime", last),
            "onnxpar": (sys.executable, "Onnxpar", paged),
        }
        is_lasting = self.is_small(len(names))
        for name in names:
            yield Worker(name, *made[name], is_lasting)


def generate(
    model: Model, workers: Sequence[Worker], args: argparse.Namespace
) -> Iterator[tuple[str, Answers]]:
    """Measures each batch of prompts. Errors: SystemExit if systems disagree."""
    for length in args.prompts:
        for batch in args.batches:
            title = f"{model.name}, {batch} x {length}"
            draw = random.Random(title)
            found: Answers = {worker.name: [] for worker in workers}
            for number in range(args.rounds + 1):
                warm, texts = (model.texts(draw, [n] * batch) for n in (PROMPTS[0], length))
                # The first round is not counted: buffers grow.
                new = args.new if number else 2
                for worker in workers:
                    answer = worker.measure((GENERATE, warm, 2), (GENERATE, texts, new))
                    if number:
                        found[worker.name].append(answer)
            for name in found:
                if batch * args.rounds >= ENOUGH and report.same(found, name) < report.SAME:
                    raise SystemExit(f"{title}: {name} disagrees with {workers[0].name}")
            yield title, found


def serve(model: Model, workers: Sequence[Worker], args: argparse.Namespace) -> tuple[str, Answers]:
    """Measures all clients. Lengths are the same in all rounds, texts are not."""
    sizes = random.Random(0)
    count = CLIENTS * args.requests
    lengths = [sizes.randint(*PROMPTS) for _ in range(count)]
    answers = [sizes.randint(*ANSWERS) for _ in range(count)]
    draw = random.Random(model.name)
    found: Answers = {worker.name: [] for worker in workers}
    for _ in range(args.rounds):
        given = list(zip(model.texts(draw, lengths), answers, strict=True))
        clients = [given[client::CLIENTS] for client in range(CLIENTS)]
        warm = [[(text, 2)] for text in model.texts(draw, lengths[:CLIENTS])]
        for worker in workers:
            found[worker.name].append(worker.measure(("requests", warm), ("requests", clients)))
    return f"{model.name}, {CLIENTS} clients", found


def measured(model: Model, args: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """The kind, the title and the figures of each table; the last one is that of memory."""
    with ExitStack() as stack:
        workers = list(model.workers(args))
        for worker in workers:
            stack.callback(worker.close)

        def those(kind: str) -> list[Worker]:
            return [worker for worker in workers if kind in SYSTEMS[worker.name]]

        if GENERATE in args.only and those(GENERATE):
            for title, found in generate(model, those(GENERATE), args):
                yield GENERATE, title, found
        if SERVE in args.only and those(SERVE):
            yield SERVE, *serve(model, those(SERVE), args)
        peaks = {worker.name: worker.peaks for worker in workers if worker.peaks}
        yield "memory", f"{model.name}, memory", peaks


SHOWN = {GENERATE: report.generated, SERVE: report.served, "memory": report.held}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder where models stay")
    parser.add_argument("--peers-python", default=sys.executable, help="makes models, runs genai")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "int4"), default=["fp32", "int4"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--only", nargs="+", choices=(GENERATE, SERVE), default=[GENERATE, SERVE])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--new", type=int, default=32, help="tokens of each text")
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a round of the smallest model")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--plot", type=Path, help="file to draw the times to tokens to")
    args = parser.parse_args()
    if args.quick:
        args.shapes, args.dtypes, args.rounds = ["0.2B"], ["fp32"], 1
        args.batches, args.prompts, args.new, args.requests = [1, 4], [32], 8, 1
    if args.new < 2:
        parser.error("--new must be at least 2")
    return args


def leave_out(args: argparse.Namespace) -> Iterator[str]:
    """Drops systems that cannot be measured here, and says why; or their version."""
    reason = lacks(args.peers_python, "llama_cpp")
    more = "its package brings no converter from transformers to GGUF"
    yield f"llama.cpp: left out, {reason or more}"
    reason = lacks(args.peers_python, "onnxruntime_genai")
    if reason:
        args.systems = [name for name in args.systems if not name.startswith("genai")]
    found = f"left out, {reason}" if reason else version(args.peers_python, "onnxruntime-genai")
    yield f"onnxruntime-genai: {found}"


def main() -> None:
    """Prints tables of each model as they are measured."""
    args = arguments()
    about = {key: value for key, value in machine().items() if value != "not installed"}
    lines = [*(f"{key}: {value}" for key, value in about.items()), *leave_out(args)]
    print("\n".join(lines), flush=True)
    tables: dict[str, dict[str, Any]] = {}
    for shape in args.shapes:
        for dtype in args.dtypes:
            for kind, title, found in measured(Model.of(shape, dtype, args), args):
                print("\n".join(SHOWN[kind](title, found)), flush=True)
                tables.setdefault(kind, {})[title] = found
                if args.json:
                    text = json.dumps({"machine": lines, **tables}, indent=1)
                    args.json.write_text(text + "\n")
    if args.plot and tables.get(GENERATE):
        report.write_plot(args.plot, about, tables[GENERATE])


if __name__ == "__main__":
    main()
