"""The notebook's cells run in their order, and it is one that Jupyter opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from docs.blocks import ROOT

NOTEBOOK = ROOT / "docs/tutorials/first.ipynb"
BOOK: dict[str, Any] = json.loads(NOTEBOOK.read_text())
KEYS = {"markdown": {"cell_type", "id", "metadata", "source"}}
KEYS["code"] = KEYS["markdown"] | {"execution_count", "outputs"}


def test_it_is_a_notebook_without_outputs() -> None:
    assert (BOOK["nbformat"], BOOK["nbformat_minor"]) == (4, 5)
    cells = BOOK["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert set(cell) == KEYS[cell["cell_type"]]
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_its_cells_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    for cell in BOOK["cells"]:
        if cell["cell_type"] == "code":
            text = "".join(cell["source"])
            exec(compile(text, f"{NOTEBOOK.name}:{cell['id']}", "exec"), names)
    assert len(names["losses"]) == 3 and names["work"].parent == tmp_path
    assert names["plan"]._repr_html_().startswith("<")
    assert "largest difference" in capsys.readouterr().out
