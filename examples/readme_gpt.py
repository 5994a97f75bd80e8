"""A small GPT-2 learns the README of this repository, letter by letter, over 4 ranks.

    python examples/readme_gpt.py [--mesh dp=2,tp=2 | --devices 2] [--preset hybrid]

Two layers and 48 kinds of letters: the 47 most frequent ones in lower case, and one for all others.
The trained parts become a plain model again, which an ordinary onnxruntime then writes text with.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime as ort

import onnxpar
from onnxpar.trainer.data import Data
from onnxpar.trainer.loop import Run, records
from onnxpar.trainer.merge import merge
from onnxpar.trainer.rates import Schedule
from onnxpar.trainer.trainer import Trainer
from onnxpar.training import grad

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "gpt2.legacy.training.onnx"
LETTERS, BATCH, LENGTH, STRIDE = 48, 4, 16, 5
OTHER = "~"


def read() -> tuple[str, np.ndarray]:
    """The letters that there are, and the text as numbers of them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").lower().replace(OTHER, "")
    letters = "".join(c for c, _ in Counter(text).most_common(LETTERS - 1)) + OTHER
    return letters, np.array([letters.find(c) % LETTERS for c in text], np.int64)


def windows(text: np.ndarray) -> dict[str, np.ndarray]:
    """Pieces of the text, and for each letter the one behind it."""
    starts = np.arange(0, len(text) - LENGTH, STRIDE)
    pieces = text[starts[:, None] + np.arange(LENGTH + 1)]
    ids, labels = pieces[:, :-1], pieces[:, 1:]
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}


def entropy(text: np.ndarray) -> float:
    """The loss of one who knows how frequent each letter is, and nothing else."""
    _, counts = np.unique(text, return_counts=True)
    share = counts / len(text)
    return float(-(share * np.log(share)).sum())


def write_on(model: Path, text: np.ndarray, length: int) -> np.ndarray:
    """Goes on from the end of a text, each letter drawn as the model finds it probable."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    mask = np.ones((BATCH, LENGTH), np.int64)
    for _ in range(length):
        ids = np.repeat(text[None, -LENGTH:], BATCH, axis=0)
        (logits,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})
        scores = logits[0, -1].astype(np.float64) / 0.7
        odds = np.exp(scores - scores.max())
        text = np.append(text, random.choice(LETTERS, p=odds / odds.sum()))
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int)
    parser.add_argument("--mesh")
    parser.add_argument("--preset", default="hybrid")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    return parser.parse_args()


def main() -> None:
    """Trains; prints the loss of each epoch, and text by the model that was trained."""
    args = arguments()
    mesh = {"devices": args.devices} if args.devices else {"mesh": args.mesh or "dp=2,tp=2"}
    letters, text = read()
    print(f"letters by their frequency alone: loss is {entropy(text):.2f}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        step, par, trained = (folder / name for name in ("step.onnx", "step.par", "trained.onnx"))
        how = {"optimizer": "adamw", "clip_norm": 1.0, "accumulate": 4}
        grad(MODEL, step, loss="softmax-cross-entropy", **how)
        onnxpar.shard(step, par, preset=args.preset, **mesh)
        schedule = Schedule("cosine", warmup=20)
        run = Run(args.epochs, args.lr, schedule, checkpoint=folder / "checkpoints")
        with Trainer(par) as trainer:
            data = Data.of(windows(text), trainer.data, trainer.spec.batch)
            losses = []
            for record in records(trainer, data, run):
                losses.append(record.values["loss"])
                if record.step == data.batches:
                    loss = np.mean(losses[-data.batches :])
                    print(f"epoch: {record.epoch} step: {record.step}, loss is {loss:.2f}")
        merge(folder / "checkpoints", MODEL, trained)
        written = write_on(trained, text[:LENGTH], 240)
    print("".join(letters[i] for i in written))


if __name__ == "__main__":
    main()
