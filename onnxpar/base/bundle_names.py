"""The names of the files in the folder of a sharded model, and which names may be there at all."""

from __future__ import annotations

import re
from pathlib import Path

from onnxpar.base.errors import ModelError

PLAN = "plan.json"
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
"""The files of a sharded model that are copies of those beside its model."""
SHARED = "shared.weights"
"""The weights that all ranks hold."""

_OWN = re.compile(
    r"plan\.json|shared(_\d{4,})?\.weights|rank_\d{4,}\.([\w-]+\.)?(onnx|weights)|"
    + "|".join(map(re.escape, CARRIED))
)
_GRAPH = re.compile(r"rank_(\d{4,})\.([\w-]+\.)?onnx")


def rank_name(rank: int, suffix: str) -> str:
    """The name of a file that belongs to one rank: `rank_0003.onnx`."""
    return f"rank_{rank:04d}.{suffix}"


def suffix_of(*programs: str) -> str:
    """The end of the names of the files with a program of each rank: of a step for some length of
    samples, and of its evaluation, if they are named."""
    return ".".join([*filter(None, ["-".join(filter(None, programs))]), "onnx"])


def shared_name(number: int) -> str:
    """The name of the file with the weights of a group of several ranks, which are numbered."""
    return f"shared_{number:04d}.weights"


def owner_of(name: str) -> int | None:
    """The rank to which a graph or a file of first values belongs, by its name; None for any other
    file."""
    found = _GRAPH.fullmatch(name)
    return None if found is None else int(found[1])


def is_own(name: str) -> bool:
    """True for a name that onnxpar gives to files of sharded models, and so may read there."""
    return _OWN.fullmatch(name) is not None


def check_inner(name: str) -> None:
    """Checks a name in a list of files, which may come from anywhere. Errors: ValueError unless it
    is that of a file inside the folder: relative, without `..`, and printable."""
    is_inner = not any(part in ("", ".", "..") for part in name.split("/"))
    if not is_inner or "\\" in name or not name.isprintable() or name == PLAN:
        raise ValueError(f"{name!r} is not the name of a file in the folder")


def inner_path(folder: Path, name: str) -> Path:
    """Returns the path of a listed file. Errors: ModelError if links lead out of the folder."""
    path = folder / name
    target = path.resolve()
    if not target.is_relative_to(folder.resolve()):
        raise ModelError(
            f"{path} is a link to {target}, outside of the folder; put a copy of the file there"
        )
    return path
