"""MindSpore's names for options: what each becomes, and that plans follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import yaml
from small_models import HEAD, write_text

import onnxpar
import onnxpar.training
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.planner.auto_parallel_context import SETTINGS

MLP = """m (float[8,16] x, float[16,32] w1, float[32,16] w2, float[16,4] w3) => (float[8,4] y)
{ h = MatMul(x, w1)  r = Relu(h)  g = MatMul(r, w2)  s = Relu(g)  y = MatMul(s, w3) }"""
DP: dict[str, Any] = {"device_num": 4, "parallel_mode": "data_parallel"}
SEMI: dict[str, Any] = {"device_num": 4, "parallel_mode": "semi_auto_parallel"}
AUTO: dict[str, Any] = {"device_num": 4, "parallel_mode": "auto_parallel"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(HEAD + MLP, tmp_path_factory.mktemp("model") / "m.onnx")


@pytest.fixture(scope="module")
def step(model: Path) -> Path:
    path = model.parent / "step.onnx"
    onnxpar.training.grad(model, path, loss="mse", optimizer="adam")
    return path


FOLLOWED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"device_num": 4}, {"devices": 4}),
    ({"parallel_mode": "stand_alone"}, {"devices": 1}),
    (DP, {"devices": 4, "preset": "data-parallel"}),
    ({"parallel_mode": "hybrid_parallel"}, {"preset": "manual"}),
    (SEMI, {"devices": 4, "preset": "data-parallel"}),
    (AUTO, {"devices": 4, "search": "auto"}),
    ({**AUTO, "search_mode": "dynamic_programming"}, {"devices": 4, "search": "auto"}),
    (
        {**AUTO, "auto_parallel_search_mode": "sharding_propagation"},
        {"devices": 4, "search": "propagation"},
    ),
    ({**DP, "enable_parallel_optimizer": True}, {"devices": 4, "preset": "zero1"}),
    (
        {
            **DP,
            "parallel_optimizer": True,
            "parallel_optimizer_config": {"gradient_accumulation_shard": True},
        },
        {"devices": 4, "preset": "zero2"},
    ),
    ({**SEMI, "enable_parallel_optimizer": True}, {"devices": 4, "preset": "zero3"}),
    ({**SEMI, "enable_parallel_optimizer": False}, {"devices": 4, "preset": "data-parallel"}),
    (
        {
            "gradients_mean": True,
            "gradient_fp32_sync": True,
            "loss_repeated_mean": True,
            "enable_alltoall": True,
            "parameter_broadcast": False,
            "pipeline_stages": 1,
            "grad_accumulation_step": 1,
            "auto_pipeline": False,
        },
        {},
    ),
    ({"comm_fusion": {"openstate": False}}, {"fusion": "none"}),
    ({"comm_fusion": {"allreduce": {"mode": "auto", "config": None}}}, {"fusion": "size"}),
    (
        {
            "comm_fusion": {
                "openstate": True,
                "allreduce": {"mode": "size", "config": 32},
                "allgather": {"mode": "size", "config": 32},
            }
        },
        {"fusion": "size", "bucket_mb": 32.0},
    ),
    ({"comm_fusion": {"allreduce": {"mode": "index", "config": [1]}}}, {"fusion": "index:1"}),
    ({"all_reduce_fusion_config": (1, 2)}, {"fusion": "index:1,2"}),
    ({"full_batch": True}, {"dataset_strategy": "full_batch"}),
    ({"dataset_strategy": "data_parallel"}, {"dataset_strategy": "data_parallel"}),
    ({"dataset_strategy": ((4, 1), (4,))}, {"dataset_strategy": [[4, 1], [4]]}),
    ({"strategy_ckpt_load_file": "s.yaml"}, {"strategy": "s.yaml"}),
    ({"strategy_ckpt_save_file": "b.yaml"}, {"save_strategy": "b.yaml"}),
    (
        {
            "strategy_ckpt_config": {
                "load_file": "a.yaml",
                "save_file": "b.yaml",
                "only_trainable_params": True,
            }
        },
        {"strategy": "a.yaml", "save_strategy": "b.yaml"},
    ),
]


@pytest.mark.parametrize("settings,options", FOLLOWED)
def test_settings_become_options(settings: dict[str, Any], options: dict[str, Any]) -> None:
    assert onnxpar.auto_parallel_context(**settings) == options


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pipeline_stages": 2}, "no pipeline parallelism yet"),
    ({"pipeline_config": {"pipeline_interleave": True}}, "no pipeline parallelism yet"),
    ({"auto_pipeline": True}, "no pipeline parallelism yet"),
    ({"pipeline_result_broadcast": True}, "no pipeline parallelism yet"),
    ({"gradients_mean": False}, "multiply the learning rate"),
    ({"loss_repeated_mean": False}, "count once in the gradients"),
    ({"gradient_fp32_sync": False}, "--compression float16"),
    ({"force_fp32_communication": True}, "dtype in which they are computed"),
    ({"enable_alltoall": False}, "cheapest collectives"),
    ({"grad_accumulation_step": 4}, "--accumulate N"),
    ({"global_rank": 3}, "launcher gives each process its rank"),
    ({"device_num": 0}, "whole number from 1"),
    ({"device_num": True}, "whole number from 1"),
    ({"parallel_mode": "auto"}, "give one of stand_alone"),
    ({"search_mode": "recursive_programming"}, "parallel_mode='auto_parallel'"),
    ({**AUTO, "enable_parallel_optimizer": True}, "--memory-limit"),
    ({**DP, "parallel_optimizer_config": {"parallel_optimizer_threshold": 64}}, "no counterpart"),
    ({"comm_fusion": {"allreduce": {"mode": "size", "config": 0}}}, "number of MB"),
    ({"comm_fusion": {"allgather": {"mode": "index", "config": [1]}}}, "allreduce only"),
    (
        {
            "comm_fusion": {
                "allreduce": {"mode": "size", "config": 8},
                "allgather": {"mode": "auto", "config": None},
            }
        },
        "one mode and size is for all kinds",
    ),
    ({"all_reduce_fusion_config": [3, 2]}, "rising indices"),
    ({"dataset_strategy": "columns"}, "data_parallel"),
    ({"full_batch": 1}, "True or False"),
    ({"full_batch": True, "dataset_strategy": "data_parallel"}, "different values"),
    ({"parallel_mode": "stand_alone", "device_num": 4}, "different values of devices"),
    ({"strategy_ckpt_load_file": "s.ckpt"}, "in YAML"),
    ({"strategy_ckpt_config": {"only_trainable_params": False}}, "no counterpart"),
    ({"group_ckpt_save_file": "g.pb"}, "plan.json"),
    ({"dump_local_norm": True}, "--clip-norm"),
    ({"dump_local_norm_path": "d"}, "metrics.jsonl"),
    ({"dump_device_local_norm": True}, "--clip-norm"),
]


@pytest.mark.parametrize("settings,words", REFUSED)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(StrategyError, match=words.replace("--", ".*--")):
        onnxpar.auto_parallel_context(**settings)


def test_every_setting_is_in_a_test() -> None:
    tested = {name for settings, _ in (*FOLLOWED, *REFUSED) for name in settings}
    assert tested == SETTINGS.keys()
    with pytest.raises(TypeError, match="did you mean 'device_num'"):
        onnxpar.auto_parallel_context(device_nums=2)


def test_a_plan_follows_the_context(step: Path) -> None:
    plan = onnxpar.plan(step, **onnxpar.auto_parallel_context(**DP, full_batch=False))
    assert plan.preset == "data-parallel" and plan.mesh.size == 4
    zero = onnxpar.plan(
        step, **onnxpar.auto_parallel_context(**SEMI, enable_parallel_optimizer=True)
    )
    whole, split = (each.memory["states_per_rank"] for each in (plan, zero))
    assert split < whole / 3


def test_a_strategy_file_has_a_context(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump({"context": {**DP, "enable_parallel_optimizer": True}}))
    assert onnxpar.plan(step, strategy=file).preset == "zero1"
    assert main(["plan", str(step), "--strategy", str(file)]) == 0
    assert "over 4 ranks (mesh dp=4, zero1)" in capsys.readouterr().out
    assert main(["plan", str(step), "--strategy", str(file), "--preset", "zero3"]) == 2
    assert "context asks for preset='zero1'" in capsys.readouterr().err
    for context, words in (
        ({"pipeline_stages": 2}, "s.yaml: context: pipeline_stages=2: onnxpar has no pipeline"),
        ({"strategy_ckpt_save_file": "b.yaml"}, "give --save-strategy b.yaml there"),
        ({"device_nums": 2}, "did you mean 'device_num'"),
    ):
        file.write_text(yaml.safe_dump({"context": context}))
        assert main(["plan", str(step), "--strategy", str(file), "--devices", "2"]) == 2
        assert words in capsys.readouterr().err


def test_a_context_where_nothing_is_fused(step: Path, tmp_path: Path) -> None:
    """annotate and opt follow what they have options for; grad has none."""
    context = {**DP, "comm_fusion": {"openstate": False}}
    strategy = {"context": context}
    plan = onnxpar.annotate(step, tmp_path / "a.onnx", strategy=strategy)
    assert plan.preset == "data-parallel" and plan.mesh.size == 4
    assert not onnxpar.plan(step, strategy=strategy).fused
    with pytest.raises(StrategyError, match="context is for `onnxpar shard`"):
        onnxpar.training.grad(
            step.parent / "m.onnx",
            tmp_path / "s.onnx",
            loss="mse",
            optimizer="sgd",
            preset="manual",
            strategy=strategy,
        )


def layouts(plan: Any) -> dict[str, str]:
    return {p.name: p.layout.text(plan.mesh) for p in plan.inputs if p.layout is not None}


@pytest.mark.matrix
@pytest.mark.parametrize("preset", [None, "tensor-parallel"])
@pytest.mark.parametrize(
    "asked,wanted",
    [("full_batch", (1, 1)), ("data_parallel", (4, 1)), ([[2, 2]], (2, 2))],
)
def test_data_inputs_have_the_layout_of_the_dataset(
    model: Path, preset: str | None, asked: Any, wanted: tuple[int, int]
) -> None:
    from onnxpar.layout.layout import split_count

    mesh = "a=2,b=2" if asked == [[2, 2]] else None
    how = {"preset": preset, "mesh": mesh, "devices": None if mesh else 4}
    found = onnxpar.check(model, dataset_strategy=asked, **how)
    assert found.ok
    (port,) = found.plan.inputs
    assert port.layout is not None and tuple(map(split_count, port.layout.dims)) == wanted


@pytest.mark.parametrize("asked", ["data_parallel", [[2, 1]]])
def test_data_inputs_of_an_annotated_model(model: Path, tmp_path: Path, asked: Any) -> None:
    """The annotations say how many ranks there are."""
    annotated = tmp_path / "annotated.onnx"
    onnxpar.annotate(model, annotated, devices=2, preset="data-parallel")
    plan = onnxpar.plan(annotated, dataset_strategy=asked)
    assert list(layouts(plan).values()) == ["[dp, -]"]
    with pytest.raises(StrategyError, match="how many ranks"):
        onnxpar.plan(model, dataset_strategy=asked)


def test_data_inputs_of_a_step(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters and the learning rate are no data; the numbers are in the order of the inputs."""
    how: dict[str, Any] = {"devices": 2, "preset": "tensor-parallel"}
    data = onnxpar.training.grad(step.parent / "m.onnx", step, loss="mse", optimizer="adam").data
    plan = onnxpar.plan(step, dataset_strategy=[[2, 1], [1, 1]], **how)
    assert [layouts(plan)[name] for name in data] == ["[tp, -]", "[-, -]"]
    args = ["plan", str(step), "--devices", "2", "--preset", "tensor-parallel"]
    for text, words in (
        ("columns", "give data_parallel, full_batch"),
        ("[[2, 1]]", "lists 1 inputs; the data inputs are x, "),
        ("[[2], [1]]", "x has 2 dimensions"),
        ("[[0, 1], [1, 1]]", "numbers of shards"),
        ("[" * 100_000, "give data_parallel, full_batch"),
    ):
        assert main([*args, "--dataset-strategy", text]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(StrategyError, match="manual program"):
        onnxpar.plan(
            step.parent / "m.onnx", devices=2, preset="manual", dataset_strategy="full_batch"
        )


def test_fusion_by_index(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 3 gradients: 1 and then 2; 2 and then 1; each alone. The sums stay the same."""
    how: dict[str, Any] = {"devices": 2, "preset": "data-parallel"}
    for fusion, counts in (("index:1", [1, 2]), ("index:2", [2, 1]), ("index:1,2", [1, 1, 1])):
        plan = onnxpar.plan(step, fusion=fusion, **how)
        sums = [c for c in plan.collectives if ".grad" in c.tensor]
        assert [len(c.tensor.split()) for c in sums] == counts
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((16, 16)), "target": rng.standard_normal((16, 4))}
    data = onnxpar.plan(step, **how).to_json()["step"]["data"]
    named = dict(zip(data, (v.astype(np.float32) for v in feeds.values()), strict=True))
    assert onnxpar.check(step, named, train=True, steps=3, fusion="index:1", **how).ok
    args = ["plan", str(step), "--devices", "2", "--preset", "data-parallel", "--fusion"]
    for text in ("index:", "index:2,1", "index:0", "index:x", "indices"):
        assert main([*args, text]) == 2
        assert "--fusion" in capsys.readouterr().err
    with pytest.raises(StrategyError, match="only a training step has gradients"):
        onnxpar.plan(step.parent / "m.onnx", fusion="index:1", **how)


def test_the_model_computes_the_same_under_a_context(model: Path, tmp_path: Path) -> None:
    context = onnxpar.auto_parallel_context(**AUTO, full_batch=True)
    onnxpar.shard(model, tmp_path / "m.par", **context)
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    (wanted,) = ort.InferenceSession(model).run(None, {"x": x})
    with onnxpar.InferenceSession(tmp_path / "m.par") as session:
        (found,) = session.run(None, {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
