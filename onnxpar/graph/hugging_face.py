"""Exports models of Hugging Face that are not ONNX into a cache; needs the extra `hf`.

The exporter runs in a process of its own, whose end frees the memory of the model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from onnxpar.base.bundle_names import CONFIG, GENAI
from onnxpar.base.errors import ModelError
from onnxpar.base.folder_lock import FolderLock
from onnxpar.base.log import LOG
from onnxpar.base.new_folder import new_folder
from onnxpar.base.read_bounded import read_bounded
from onnxpar.base.user_cache import user_cache
from onnxpar.base.version import UNKNOWN, version_of
from onnxpar.base.write_file import writing

EXPORTER = ("-m", "optimum.commands.optimum_cli", "export", "onnx")
"""Arguments to Python that run the exporter."""
PACKAGES = ("optimum-onnx", "transformers", "torch")
"""The exporter's package, and other packages on which its output depends."""
PATIENCE = 3600.0
"""Longest wait, in seconds, for another process that exports the same model."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+(?<!\.onnx)(?<!\.par)")
"""The form of a model's name on the hub of Hugging Face: `owner/name`."""
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception): ")
_DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Files to download for a model of the hub, which may have its weights in other formats, too."""
_TASKS = {
    "WhisperForConditionalGeneration": "automatic-speech-recognition-with-past",
    "ForConditionalGeneration": "text2text-generation-with-past",
    "ForCausalLM": "text-generation-with-past",
    "LMHeadModel": "text-generation-with-past",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}
"""The exporter's word for what a model does, by the end of the name of its architecture."""


def exported(path: Path) -> Path:
    """Returns the folder with the ONNX files of a model. If `path` is a folder of Transformers
    without ONNX files, or a name on the hub, and the exporter is installed, the model is exported
    at first use; other paths are returned as they are. Errors: ModelError if the export fails."""
    if version_of(PACKAGES[0]) == UNKNOWN:
        return path
    folder = _downloaded(str(path)) if is_on_hub(path) else path
    return _exported(folder, path.name or folder.resolve().name) if is_model(folder) else path


def is_on_hub(path: Path) -> bool:
    """True if nothing exists at this path, and it has the form of a name on the hub
    (`owner/name`)."""
    is_name = _HUB.fullmatch(str(path)) is not None
    return is_name and not path.exists() and not path.parent.exists()


def is_model(folder: Path) -> bool:
    """True for a folder of Transformers with weights, but without ONNX files."""
    places = (folder, folder / "onnx")
    return (
        (folder / CONFIG).is_file()
        and any(folder.glob("model*.safetensors"))
        and not (folder / GENAI).exists()
        and not any(file for place in places for file in place.glob("*.onnx"))
    )


def task_of(folder: Path) -> str:
    """Returns the exporter's word for what a model does, from its config.json; "feature-extraction"
    if unknown."""
    try:
        (name,) = json.loads(read_bounded(folder / CONFIG))["architectures"]
        ends = [end for end in _TASKS if str(name).endswith(end)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # the exporter says more
        ends = []
    return _TASKS[ends[0]] if ends else "feature-extraction"


@functools.cache
def _downloaded(name: str) -> Path:
    """Returns the folder of a model of the hub, in the cache of Hugging Face's own library;
    downloads it if needed. Errors: ModelError."""
    from huggingface_hub import snapshot_download

    LOG.info(f"there is no file {name}: taking the model of this name on the hub of Hugging Face")
    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED))
    except Exception as error:  # of the network, of the hub, of the disk: each of another library
        raise ModelError(
            f"there is no file {name}, and the hub of Hugging Face gives no such model: "
            f"{_last_line(str(error)) or type(error).__name__}"
        ) from error


def _exported(folder: Path, name: str) -> Path:
    """Returns the folder of a model's ONNX files in the cache; exports the model if it is not
    there. Errors: ModelError."""
    cache = user_cache()
    if cache is None:
        raise ModelError(f"{folder} must be exported, and there is no home: set XDG_CACHE_HOME")
    try:
        place = cache / "exported" / _digest(folder) / name
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from None
    if not place.is_dir():
        told = f"{folder} with {PACKAGES[0]} {version_of(PACKAGES[0])} to {place}"
        LOG.info(f"exporting {told}, which later commands read")
        # Another process may export the same model, and its files are as good.
        with writing(place), FolderLock(place.parent, patience=PATIENCE):
            if not place.is_dir():
                with new_folder(place, lambda old: None) as new:
                    _export(folder, new)
    return place


def _digest(folder: Path) -> str:
    """Returns a digest of all that decides the exported files: the model's files, its task, and
    versions of packages."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    about = (
        hashlib.sha256(read_bounded(folder / CONFIG)).hexdigest(),
        stats,
        task_of(folder),
        [version_of(package) for package in PACKAGES],
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()[:12]


def _export(folder: Path, output: Path) -> None:
    """Runs the exporter on a model; it writes to `output`. Errors: ModelError with the exporter's
    last line."""
    arguments = ("--model", str(folder.resolve()), "--task", task_of(folder))
    done = subprocess.run(
        [sys.executable, *EXPORTER, *arguments, str(output)],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    if done.returncode != 0 or not any(output.glob("*.onnx")):
        last = _last_line(done.stderr) or _last_line(done.stdout) or f"status {done.returncode}"
        raise ModelError(
            f"{folder} cannot be exported: {last}; to export it by hand, run "
            f"`{export_command(arguments, f'{folder.name}-onnx')}`, and give that folder"
        )


def export_command(arguments: Sequence[str], output: str) -> str:
    """Returns the command line by which a user can run the exporter, with output to the folder
    `output`."""
    return shlex.join(["optimum-cli", "export", "onnx", *arguments, output])


def _last_line(text: str) -> str:
    """Returns the last line of the exporter's output that names an exception (whose text may
    continue below), else its last line; empty if there is none."""
    lines = [line.strip() for line in reversed(text.splitlines()) if line.strip()]
    return next(filter(_EXCEPTION.match, lines), next(iter(lines), ""))
