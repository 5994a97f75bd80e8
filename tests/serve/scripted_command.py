"""`onnxpar serve` with a scripted engine, in a process of its own: arguments are those of the
command; the answers last as long as the environment says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from serve import scripted_engine

import onnxpar.llm.engine
from onnxpar.cli import main


class Engine(scripted_engine.Engine):
    """An engine whose answers take a while."""

    def __init__(self, par: object, **options: object) -> None:
        super().__init__(par, **options)
        self.script, self.delay = scripted_engine.forever, float(os.environ["DELAY"])


if __name__ == "__main__":
    onnxpar.llm.engine.Engine = Engine  # type: ignore[misc, assignment]
    sys.exit(main(["serve", *sys.argv[1:]]))
