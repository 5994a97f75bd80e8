"""The text that `inspect --verify` and `inspect --sha256sums` print."""

from __future__ import annotations

import os
from pathlib import Path

from onnxpar.base.bundle_names import PLAN
from onnxpar.base.digests import file_sum
from onnxpar.runtime.session.bundle import Bundle, with_encoder
from onnxpar.runtime.session.bundle_files import ranks_text


def verified_text(par: str | os.PathLike[str]) -> str:
    """Returns a text that says how many files were verified, which ranks have no files here, and
    the digest that covers all. Errors: ModelError."""
    each = with_encoder(Bundle.load(par))
    bundle = each[0]
    count = sum(one.files.has(name) for one in each for name in one.files.listed)
    absent = bundle.files.absent
    there = f"; there are no files of {ranks_text(absent)}" if absent else ""
    return (
        f"verified: every byte of {count} files is what was written{there}\n"
        f"plan.json, which lists them: SHA-256 {bundle.digest} (with zeros in its place)"
    )


def sum_lines(par: str | os.PathLike[str]) -> list[str]:
    """Returns a line for each file in the folder, in the format of `sha256sum`. Errors: ModelError
    if a file has changed since it was written."""
    lines = []
    for bundle in with_encoder(Bundle.load(par)):
        bundle.files.check_whole()
        for name in [PLAN, *filter(bundle.files.has, bundle.files.listed)]:
            path = bundle.path / name
            place = path.relative_to(Path(par)).as_posix()
            line = f"{file_sum(path)}  {place}"
            lines += [line] if line not in lines else []
    return lines
