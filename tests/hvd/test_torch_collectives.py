"""Collectives on tensors of PyTorch, and their gradients, against torch on all ranks' tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnxpar.base.errors import InputError

torch = pytest.importorskip("torch")

import onnxpar.hvd.torch as hvd  # noqa: E402

RANKS = 2
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "complex64"]


def drawn(seed: int, *shape: int, dtype: str = "float32") -> Any:
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.integers(1, 9, (*shape, 2)).astype("f4"))
    kind = getattr(torch, dtype)
    return torch.view_as_complex(x) if kind.is_complex else x[..., 0].to(kind)


def every(*shape: int, dtype: str = "float32") -> list[Any]:
    return [drawn(rank, *shape, dtype=dtype) for rank in range(RANKS)]


def on_ranks(body: Callable[[], Any]) -> list[Any]:
    return hvd.run_on_threads(body, RANKS)


def same(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_strides(dtype: str) -> None:
    xs = every(3, 4, dtype=dtype)
    wanted = sum(xs)

    def body() -> None:
        x = xs[hvd.rank()].t()
        same(hvd.allreduce(x, op=hvd.Sum), wanted.t())
        same(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), wanted.t())
        same(hvd.allgather(x), torch.cat([each.t() for each in xs]))
        same(hvd.broadcast(x, 1), xs[1].t())
        same(hvd.alltoall(x), torch.cat([each.t().chunk(2)[hvd.rank()] for each in xs]))
        same(hvd.reducescatter(x, op=hvd.Sum), wanted.t().chunk(2)[hvd.rank()])
        base = torch.zeros(6, 4, dtype=x.dtype)
        part = base[::2].t()
        part.copy_(x)
        assert hvd.allreduce_(part, op=hvd.Sum) is part
        same(base[::2], wanted)
        assert not base[1::2].any(), "beside the view"
        assert hvd.broadcast_(part.copy_(x), 0) is part
        same(part, xs[0].t())

    on_ranks(body)


def test_groups() -> None:
    xs, ys = every(3), every(2, 2, dtype="bfloat16")

    def body() -> None:
        mine = [xs[hvd.rank()].clone(), ys[hvd.rank()].clone()]
        sums = [sum(xs), sum(ys)]
        gathered = [torch.cat(xs), torch.cat(ys)]
        for found, expected in (
            (hvd.grouped_allreduce(mine, op=hvd.Sum), sums),
            (hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)), sums),
            (hvd.grouped_allgather(mine), gathered),
            (hvd.synchronize(hvd.grouped_allgather_async(mine)), gathered),
            (hvd.grouped_reducescatter([torch.ones(2)], op=hvd.Sum), [torch.tensor([2.0])]),
            (
                hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(2)], op=hvd.Sum)),
                [torch.tensor([2.0])],
            ),
            (hvd.grouped_allreduce_(mine, op=hvd.Sum), sums),
            (mine, sums),
        ):
            for one, other in zip(found, expected, strict=True):
                same(one, other)

    on_ranks(body)


def test_splits() -> None:
    def body() -> Any:
        x = torch.arange(3.0) + 10 * hvd.rank()
        splits = torch.tensor([1, 2] if hvd.rank() else [2, 1])
        result, received = hvd.alltoall(x, splits)
        handle = hvd.alltoall_async(x, splits.tolist())
        assert torch.equal(hvd.synchronize(handle)[0], result)
        assert handle() is handle(), "a result is converted once"
        return result.tolist(), received.tolist(), received.dtype

    assert on_ranks(body) == [
        ([0.0, 1.0, 10.0], [2, 1], torch.int64),
        ([2.0, 11.0, 12.0], [1, 2], torch.int64),
    ]


def test_sparse_tensors() -> None:
    def body() -> Any:
        index = torch.tensor([[2, 0, 2]])
        x = torch.sparse_coo_tensor(index, torch.ones(3, 2) + hvd.rank(), (4, 2))
        return hvd.sparse_allreduce_async(x, "x", hvd.Average)().to_dense().tolist()

    assert on_ranks(body) == [[[1.5, 1.5], [0.0, 0.0], [3.0, 3.0], [0.0, 0.0]]] * 2


GRADIENTS: dict[str, tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any]], float]] = {
    "a sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs: [sum(xs)] * 2, 1),
    "an average": (
        lambda x: hvd.allreduce(x, prescale_factor=3.0),
        lambda xs: [sum(xs) * 1.5] * 2,
        1,
    ),
    "a group": (
        lambda x: torch.cat(hvd.grouped_allreduce([x, x * x], op=hvd.Sum)),
        lambda xs: [torch.cat([sum(xs), sum(x * x for x in xs)])] * 2,
        1,
    ),
    "gathered": (
        lambda x: hvd.allgather(x[: 1 + hvd.rank()]),
        lambda xs: [torch.cat([xs[0][:1], xs[1][:2]])] * 2,
        0.5,  # the average over the ranks, as in Horovod
    ),
    "from a root": (lambda x: hvd.broadcast(x, 1), lambda xs: [xs[1]] * 2, 0.5),
    "exchanged": (
        lambda x: hvd.alltoall(x, [1, 3] if hvd.rank() else [2, 2])[0],
        lambda xs: [torch.cat([xs[0][:2], xs[1][:1]]), torch.cat([xs[0][2:], xs[1][1:]])],
        1,
    ),
    "scattered": (hvd.reducescatter, lambda xs: list((sum(xs) / 2).chunk(2)), 1),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case: str) -> None:
    """Those of the sum of all ranks' results, from torch's on one process."""
    run, reference, factor = GRADIENTS[case]
    leaves = [x.requires_grad_() for x in every(4, 3)]

    def weighted(results: list[Any]) -> list[Any]:
        return [
            (y * torch.arange(1 + rank, 1 + rank + y.numel()).reshape(y.shape)).sum()
            for rank, y in enumerate(results)
        ]

    sum(weighted(reference(leaves))).backward()

    def body() -> None:
        x = drawn(hvd.rank(), 4, 3).requires_grad_()
        y = run(x)
        same(y.detach(), reference(leaves)[hvd.rank()].detach())
        weighted([y, y])[hvd.rank()].backward()
        wanted = leaves[hvd.rank()].grad
        same(x.grad, torch.zeros_like(x) if wanted is None else wanted * factor)

    on_ranks(body)


def test_what_is_refused() -> None:
    def body() -> None:
        with pytest.raises(InputError, match="allreduce 'z': complex tensors"):
            hvd.allreduce(torch.ones(2, dtype=torch.complex64), name="z", op=hvd.Max)
        with pytest.raises(InputError, match="a tensor is on meta"):
            hvd.allgather(torch.ones(2, device="meta"))
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(InputError, match="gradient is known for Average and Sum only"):
            hvd.allreduce(x, op=hvd.Max).sum().backward()

    on_ranks(body)


def test_objects_and_parameters() -> None:
    def body() -> None:
        rank = hvd.rank()
        mine = {"w": drawn(rank, 2, 3, dtype="bfloat16"), "c": drawn(rank, 2, dtype="complex64")}
        found = hvd.broadcast_object({"epoch": rank, "state": OrderedDict(mine)}, 1)
        assert found["epoch"] == 1
        same(found["state"]["w"], drawn(1, 2, 3, dtype="bfloat16"))
        same(found["state"]["c"], drawn(1, 2, dtype="complex64"))
        same(hvd.allgather_object(mine)[1]["w"], drawn(1, 2, 3, dtype="bfloat16"))
        layer = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        with torch.no_grad():
            for index, parameter in enumerate(layer.parameters()):
                parameter.copy_(drawn(10 * rank + index, *parameter.shape))
        expected = [drawn(10 + index, *p.shape) for index, p in enumerate(layer.parameters())]
        plain = copy.deepcopy(layer)
        hvd.broadcast_parameters(layer.state_dict(), root_rank=1)
        hvd.broadcast_parameters(plain.named_parameters(), root_rank=1)
        for module in (layer, plain):
            for parameter, wanted in zip(module.parameters(), expected, strict=True):
                same(parameter.detach(), wanted)

    on_ranks(body)


@pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS", "Adadelta"])
def test_the_state_of_an_optimizer(name: str) -> None:
    """Of a root that has stepped, to a rank that has not."""

    def stepped(parameter: Any, lr: float, times: int) -> Any:
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)([parameter], lr=lr, **options)
        for _ in range(times):
            again(optimizer, parameter)
        return optimizer

    def again(optimizer: Any, parameter: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = (parameter**2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    def body() -> list[float]:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = stepped(parameter, *((0.1, 2) if hvd.rank() else (0.7, 0)))
        hvd.broadcast_optimizer_state(optimizer, 1)
        hvd.broadcast_parameters([parameter], 1)
        again(optimizer, parameter)
        return parameter.tolist()

    parameter = torch.nn.Parameter(torch.ones(3))
    stepped(parameter, 0.1, 3)
    for found in on_ranks(body):
        assert found == pytest.approx(parameter.tolist(), rel=1e-6)


NORMS: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "images": ({}, (3, 4), "float64"),
    "rows": ({"momentum": None}, (), "float64"),
    "no weight": ({"affine": False}, (2,), "float64"),
    "no statistics": ({"track_running_stats": False}, (3, 4), "float64"),
    "bfloat16": ({}, (3, 4), "bfloat16"),
}


@pytest.mark.parametrize("sizes", [(3, 3), (1, 4), (0, 5)])
@pytest.mark.parametrize("case", NORMS)
def test_batch_normalization(case: str, sizes: tuple[int, int]) -> None:
    """That of all batches in one: results, statistics and gradients, in training and after it."""
    options, rest, dtype = NORMS[case]
    kind = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d}[len(rest)]
    plain = kind(5, dtype=torch.float64, **options)
    if plain.affine:
        with torch.no_grad():
            plain.weight.copy_(torch.arange(5) + 0.5)
            plain.bias.copy_(torch.arange(5) - 2.5)
    ours = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(torch.nn.Sequential(plain)))
    random = np.random.default_rng(0)
    shape = (sum(sizes), 5, *rest)
    xs = [
        torch.from_numpy(100 + random.standard_normal(shape)).to(getattr(torch, dtype))
        for _ in "ab"
    ]
    steps = [each.double().clone().requires_grad_() for each in xs]
    weights = torch.from_numpy(random.integers(-4, 5, shape).astype("f8"))
    expected = [plain(x) for x in steps]
    sum((y * weights).sum() for y in expected).backward()
    later = plain.eval()(steps[0])
    first, tolerance = sizes[0], 1e-9 if dtype == "float64" else 2e-2

    def close(found: Any, wanted: Any) -> None:
        torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)

    def body() -> None:
        mine = slice(None, first) if hvd.rank() == 0 else slice(first, None)
        module = copy.deepcopy(ours).to(torch.float64 if dtype == "float64" else torch.float32)
        inputs = [x[mine].clone().requires_grad_() for x in xs]
        outputs = [module(x) for x in inputs]
        assert outputs[0].dtype == xs[0].dtype
        for found, wanted in zip(outputs, expected, strict=True):
            close(found, wanted[mine])
        sum((y * weights[mine]).sum() for y in outputs).backward()
        for found, wanted in zip(inputs, steps, strict=True):
            close(found.grad, wanted.grad[mine])
        if plain.affine:
            close(hvd.allreduce(module[0].weight.grad, op=hvd.Sum), plain.weight.grad)
            close(hvd.allreduce(module[0].bias.grad, op=hvd.Sum), plain.bias.grad)
        assert module.state_dict().keys() == {f"0.{key}" for key in plain.state_dict()}
        for found, wanted in zip(module.buffers(), plain.buffers(), strict=True):
            close(found, wanted)
        close(module.eval()(inputs[0]), later[mine])

    on_ranks(body)


def test_a_batch_of_one_value() -> None:
    def body() -> None:
        with pytest.raises(InputError, match="needs 2 values per channel on all ranks, not 1"):
            hvd.SyncBatchNorm(3)(torch.ones(hvd.rank(), 3))

    on_ranks(body)
