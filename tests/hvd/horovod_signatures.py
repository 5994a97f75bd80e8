"""Reads the signatures of Horovod's functions from its source distribution.

    python tests/hvd/horovod_signatures.py [horovod-0.28.1.tar.gz]

writes horovod-0.28.1.txt beside this file. Without an argument, pip fetches the source from the
package index. Nothing of Horovod is imported: the syntax trees have all that is needed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

VERSION = "0.28.1"
FILE = Path(__file__).with_name(f"horovod-{VERSION}.txt")
SOURCES = {
    "torch/mpi_ops.py": "",
    "torch/functions.py": "",
    "torch/optimizer.py": "",
    "common/basics.py": "",
    "common/process_sets.py": "",
    "common/elastic.py": "elastic.",
    "torch/elastic/__init__.py": "elastic.",
    "torch/elastic/sampler.py": "elastic.",
    "keras/callbacks.py": "callbacks.",
    "tensorflow/__init__.py": "callbacks.",
}
"""Files of the package horovod, with the prefix of their names in our `hvd`."""
PARTS_OF_HOROVOD = ("HorovodBasics", "MPI")
"""Classes whose methods are functions of `hvd`, or that stand for other packages."""


def signatures(tree: ast.Module, prefix: str = "") -> Iterator[str]:
    """The public functions, classes and methods of a module, one a line."""
    for node in hooks if (hooks := hooks_of(tree)) else tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}{arguments(node)}"
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        functions = any("autograd" in ast.unparse(base) for base in node.bases)
        if functions:  # of torch's own machinery
            continue
        inner = "" if node.name in PARTS_OF_HOROVOD else f"{node.name}."
        for method in node.body:
            if isinstance(method, ast.FunctionDef):
                if method.name == "__init__" and inner:
                    yield f"{prefix}{node.name}{arguments(method)}"
                elif not method.name.startswith("_"):
                    yield f"{prefix}{inner}{method.name}{arguments(method)}"


def hooks_of(tree: ast.Module) -> list[ast.stmt]:
    """The hooks of a module, which TensorFlow's defines under conditions; the rest is not ours."""
    hooks = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name.endswith("Hook"))
    return list(hooks)


def arguments(node: ast.FunctionDef) -> str:
    """The arguments of a function without their types and without self."""
    for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        each.annotation = None
    node.args.args = [each for each in node.args.args if each.arg != "self"]
    for each in (node.args.vararg, node.args.kwarg):
        if each:
            each.annotation = None
    return f"({ast.unparse(node.args)})"


def extract(archive: Path) -> str:
    """The signatures in a source distribution, as the text of the file."""
    lines: set[str] = set()
    with tarfile.open(archive) as files:
        for path, prefix in SOURCES.items():
            member = files.extractfile(f"horovod-{VERSION}/horovod/{path}")
            assert member is not None
            lines.update(signatures(ast.parse(member.read()), prefix))
    exported = {line for line in lines if "(*args, **kwargs)" not in line}
    return "\n".join(sorted(exported)) + "\n"


def download(folder: Path) -> Path:
    """The source distribution, fetched from the package index."""
    command = [sys.executable, "-m", "pip", "download", "--no-binary", "horovod", "--no-deps"]
    subprocess.run([*command, "-d", str(folder), f"horovod=={VERSION}"], check=True, timeout=600)
    return folder / f"horovod-{VERSION}.tar.gz"


def main(*arguments: str) -> None:
    """Writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(arguments[0]) if arguments else download(Path(folder))
        FILE.write_text(extract(archive))


if __name__ == "__main__":
    main(*sys.argv[1:])
