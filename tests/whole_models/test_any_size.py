"""Fixed sizes below the number of parts: some ranks hold nothing, and results stay exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from agreement import check_agrees, options
from committed import MODELS
from training.models import CONV
from training.steps import MLP, check_training, write_model, write_step


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["data-parallel 5", "data-parallel 8"])
@pytest.mark.parametrize("name", ["llama.dynamo", "resnet.legacy", "unet.dynamo", "dlrm.dynamo"])
def test_a_batch_of_four(name: str, layout: str, tmp_path: Path) -> None:
    check_agrees(MODELS / f"{name}.static.onnx", tmp_path, options(layout))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "mesh", "port", "dims"),
    [
        ("resnet.legacy", "tp=5", "pixel_values", [None, None, "tp", None]),
        ("mobilenet.dynamo", "tp=8", "pixel_values", [None, None, "tp", None]),
        ("unet.legacy", "dp=5,tp=6", "sample", ["dp", None, "tp", None]),
        ("llama.dynamo", "dp=3,tp=5", "input_ids", ["dp", "tp"]),
        ("gpt2.legacy", "dp=5,tp=3", "input_ids", ["dp", "tp"]),
    ],
)
def test_rows_of_images_and_tokens(
    name: str, mesh: str, port: str, dims: list[str | None], tmp_path: Path
) -> None:
    how = options(mesh, strategy={"tensors": {port: dims}})
    check_agrees(MODELS / f"{name}.static.onnx", tmp_path, how)


def test_what_is_repeated_for_each_sample(tmp_path: Path) -> None:
    """onnxruntime would leave out an Expand to no samples."""
    path = write_model(
        """g (float[2,4,3] x, float[1,1,3] token) => (float[2,5,3] y, float[2,1,3] z)
        <int64[3] shape = {2, 1, 3}>
        { t = Relu(token)  s = Expand(t, shape)  y = Concat <axis = 1> (s, x)  z = Relu(s) }""",
        tmp_path,
    )
    check_agrees(path, tmp_path, options("data-parallel 3"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", ["data-parallel 3", "data-parallel 4", "zero1 3", "zero2 3", "zero3 3"]
)
def test_gradients_of_a_batch_of_two(layout: str, tmp_path: Path) -> None:
    step = write_step(MLP.replace("float[8,", "float[2,"), tmp_path, optimizer="adam")
    check_training(step, layout, 3)


def test_batch_statistics_of_ranks_without_samples(tmp_path: Path) -> None:
    step = write_step(CONV.replace("float[8,", "float[2,"), tmp_path, optimizer="adam")
    check_training(step, "data-parallel 3", 3)


def test_long_segments_of_which_one_may_be_empty(tmp_path: Path) -> None:
    """A detection head joins the pixels of several images, each of which ranks split by rows. With
    200,000 elements, a search through all of them for the place of each would take minutes."""
    path = write_model(
        """g (float[1,4,2,100000] x, float[1,4,500] z, float[4,4,1] w) => (float[1,4,200500] y)
        <int64[3] flat = {1, 4, 200000}>
        { a = Reshape(x, flat)  b = Concat <axis = 2> (a, z)  y = Conv(b, w) }""",
        tmp_path,
    )
    how = options("tp=3", strategy={"tensors": {"x": [None, None, "tp", None]}})
    check_agrees(path, tmp_path, how)
