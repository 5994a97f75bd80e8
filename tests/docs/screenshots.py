"""Takes the pictures of the plan's page that the documentation shows:

    python tests/docs/screenshots.py [FOLDER]

writes them to docs/images, or to another folder. It needs Chromium. Take them again where the page
changes, and look at each.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from onnxpar.cli.command_line import main

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
MODEL = ROOT / "models" / "gpt2.dynamo.static.onnx"
HOW = ("--devices", "8", "--preset", "tensor-parallel")


@dataclass(frozen=True)
class Shot:
    """A window in CSS pixels, with so many pixels of the picture in each; `search` is typed into
    the box, which is then at the top. A phone has no room for candidates above the charts."""

    name: str
    width: int
    height: int
    dark: bool = False
    scale: int = 1
    search: str = ""

    @property
    def is_phone(self) -> bool:
        return self.width < 600

    @property
    def file(self) -> str:
        """The picture's file."""
        return f"{self.name}{'-dark' if self.dark else ''}.png"


SHOTS = [
    Shot(name, width, height, dark, scale, search)
    for name, width, height, scale, search in (
        ("plan-desktop", 1280, 900, 1, ""),
        ("plan-phone", 390, 844, 2, ""),
        ("plan-search", 1280, 700, 1, "AllReduce"),
    )
    for dark in (False, True)
]


def take(folder: Path) -> None:
    """Writes all pictures to a folder."""
    from browser import browser  # beside this folder, which a script does not see

    with tempfile.TemporaryDirectory() as scratch, browser() as tab:
        model = Path(scratch) / "gpt2" / "model.onnx"
        model.parent.mkdir()
        shutil.copy(MODEL, model)
        pages = [Path(scratch) / name for name in ("candidates.html", "plan.html")]
        for page, more in zip(pages, (["--candidates"], []), strict=True):
            if main(["plan", str(model), *HOW, *more, "--html", str(page)]):
                raise SystemExit("the page could not be written")
        for shot in SHOTS:
            tab.open(pages[shot.is_phone], shot.width, shot.height, shot.dark, shot.scale)
            if shot.search:
                tab.run(
                    f"""(() => {{
                      const box = document.querySelector(".search input");
                      box.value = {shot.search!r};
                      box.form.requestSubmit();
                      box.form.scrollIntoView();
                    }})()"""
                )
            (folder / shot.file).write_bytes(tab.screenshot())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    take(folder)
