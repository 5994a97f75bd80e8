"""Language models over ranks: text in, text out. `Generator` is where to start."""

from onnxpar.llm.generator import Completion as Completion
from onnxpar.llm.generator import Generator as Generator
from onnxpar.llm.sampling import Sampling as Sampling

__all__ = ["Completion", "Generator", "Sampling"]
