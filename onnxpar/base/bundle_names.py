"""File names in the folder of a sharded model, and checks of the names that such a folder may
list."""

from __future__ import annotations

import re
from pathlib import Path

from onnxpar.base.errors import ModelError

PLAN = "plan.json"
REWRITTEN = "rewritten.onnx"
"""The graph that the loader made of a model and that ranks compute, without weights: a decoder with
caches in pages, or that branch of a file which a decoder takes."""
ENCODER_PART = "encoder"
"""The folder, in that of a sharded encoder-decoder, that holds its encoder."""
GENAI = "genai_config.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
POOLING = "pooling.json"
CARRIED = (
    GENAI,
    CONFIG,
    GENERATION,
    PREPROCESSOR,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
    "sentence_bert_config.json",
    POOLING,
)
"""Files that `shard` copies, if they exist, from the folder of the model into that of the sharded
model."""
SHARED = "shared.weights"
"""The weights that all ranks hold."""

_OWN = re.compile(
    r"plan\.json|rewritten\.onnx|shared(_\d{4,})?\.weights|rank_\d{4,}\.([\w-]+\.)?(onnx|weights)|"
    + "|".join(map(re.escape, CARRIED))
)
_GRAPH = re.compile(r"rank_(\d{4,})\.([\w-]+\.)?onnx")


def rank_name(rank: int, suffix: str) -> str:
    """The name of a file that belongs to one rank: `rank_0003.onnx`."""
    return f"rank_{rank:04d}.{suffix}"


def suffix_of(*programs: str) -> str:
    """Returns the end of the names of rank files that hold a program: `onnx`; or with names of the
    program, `suffix_of("512", "eval")` is `512-eval.onnx`. A training step has a program for each
    length of its samples (such as 512), and one for its evaluation. Empty names are left out."""
    return ".".join([*filter(None, ["-".join(filter(None, programs))]), "onnx"])


def shared_name(number: int) -> str:
    """The name of the file with weights that a group of ranks, but not all ranks, share; groups are
    numbered."""
    return f"shared_{number:04d}.weights"


def owner_of(name: str) -> int | None:
    """The rank to which a file `rank_0003.onnx` or `rank_0003.NAME.onnx` belongs, by its name; None
    for any other name."""
    found = _GRAPH.fullmatch(name)
    return None if found is None else int(found[1])


def is_own(name: str) -> bool:
    """True if the name has the form of a file that onnxpar writes into a sharded model; a folder
    with any other file is not replaced."""
    return _OWN.fullmatch(name) is not None


def check_inner(name: str) -> None:
    """Checks that `name`, an entry of a list of files that may be forged, is a path inside the
    folder: relative, without `..`, printable, and not plan.json. Errors: ValueError."""
    is_inner = not any(part in ("", ".", "..") for part in name.split("/"))
    if not is_inner or "\\" in name or not name.isprintable() or name == PLAN:
        raise ValueError(f"{name!r} is not the name of a file in the folder")


def inner_path(folder: Path, name: str) -> Path:
    """Returns `folder / name`. Errors: ModelError if symbolic links on this path lead out of the
    folder."""
    path = folder / name
    target = path.resolve()
    if not target.is_relative_to(folder.resolve()):
        raise ModelError(
            f"{path} is a link to {target}, outside of the folder; put a copy of the file there"
        )
    return path
