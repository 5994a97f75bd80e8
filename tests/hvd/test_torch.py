"""Data parallelism of PyTorch's loops over our transport, against one process of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError

torch = pytest.importorskip("torch")

from onnxpar.hvd.torch import DistributedDataParallel, DistributedSampler  # noqa: E402

BATCH, STEPS = 12, 4
NAMES = "weight", "bias"


def model(seed: int) -> Any:
    """Not from torch's random numbers, which the threads share."""
    layers = [torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)]
    module = torch.nn.Sequential(*layers).to(torch.float64)
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(random.standard_normal(tuple(parameter.shape)) / 2))
    return module


def data(step: int) -> tuple[Any, Any]:
    random = np.random.default_rng(step)
    x = torch.from_numpy(random.standard_normal((BATCH, 6)))
    return x, torch.from_numpy(random.integers(0, 3, BATCH))


def loss_of(module: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(module(x), y)


def weights(module: Any) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in module.parameters()]


def on_one(passes: int = 1) -> list[np.ndarray]:
    """The weights after steps on whole batches; `passes` add up before each step."""
    module = model(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    for step in range(0, STEPS, passes):
        optimizer.zero_grad()
        for each in range(passes):
            loss_of(module, *data(step + each)).backward()
        optimizer.step()
    return weights(module)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.0003, 0])
@pytest.mark.parametrize("passes", [1, 2])
def test_steps_are_those_of_one_process(ranks: int, bucket_cap_mb: float, passes: int) -> None:
    def body() -> list[np.ndarray]:
        module = model(hvd.rank())  # ranks begin with weights of their own
        parallel = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.2, momentum=0.9)
        mine = slice(hvd.rank(), None, ranks)
        for step in range(0, STEPS, passes):
            optimizer.zero_grad()
            for each in range(passes - 1):
                with parallel.no_sync():
                    x, y = data(step + each)
                    loss_of(parallel, x[mine], y[mine]).backward()
            x, y = data(step + passes - 1)
            loss_of(parallel, x[mine], y[mine]).backward()
            optimizer.step()
        return weights(module)

    expected = on_one(passes)
    for found in hvd.run_on_threads(body, ranks):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


def test_buckets_are_sent_while_the_backward_pass_goes_on() -> None:
    def body() -> list[list[bool]]:
        module, seen = model(0), []
        parallel = DistributedDataParallel(module, bucket_cap_mb=0)
        first = next(iter(module.parameters()))  # the last to have a gradient
        buckets = parallel._averaging._buckets
        first.register_post_accumulate_grad_hook(
            lambda _: seen.append([buckets.is_sent(f"{i}.{n}") for i in (0, 2) for n in NAMES])
        )
        for step in range(2):
            loss_of(parallel, *data(step)).backward()
        return seen

    at_the_end, meanwhile = [False] * 4, [True] * 4  # the first pass shows what comes how often
    assert hvd.run_on_threads(body, 2) == [[at_the_end, meanwhile]] * 2


def test_a_parameter_that_only_one_rank_uses() -> None:
    def body() -> list[float]:
        module = torch.nn.Module()
        module.a, module.b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        used = [module.a, module.b][: 1 + hvd.rank()]
        module.forward = lambda: sum((p * (1 + i)).sum() for i, p in enumerate(used))
        parallel = DistributedDataParallel(module)
        parallel().backward()
        return [float(p.grad[0]) for p in module.parameters()]

    assert hvd.run_on_threads(body, 2) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_and_compression(dtype: str) -> None:
    def body() -> float:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=getattr(torch, dtype)))
        module = torch.nn.Module()
        module.p = parameter
        module.forward = lambda scale: (parameter * scale).sum()
        compression = hvd.Compression.bf16 if dtype == "float32" else hvd.Compression.none
        DistributedDataParallel(module, compression=compression)(2.0 + hvd.rank()).backward()
        assert parameter.grad.dtype == getattr(torch, dtype)
        return float(parameter.grad[1])

    assert hvd.run_on_threads(body, 2) == [2.5, 2.5]


def test_buffers_are_those_of_the_first_rank() -> None:
    def body() -> list[float]:
        norm = torch.nn.BatchNorm1d(2)
        parallel = DistributedDataParallel(norm)
        parallel(torch.full((4, 2), 1.0 + hvd.rank())).sum().backward()
        parallel(torch.zeros(4, 2))  # takes the buffers of rank 0 first
        return norm.running_mean.tolist()

    found = hvd.run_on_threads(body, 2)
    assert found[0] == found[1] == pytest.approx([0.09, 0.09])


def test_the_sampler_is_torchs() -> None:
    def body() -> list[int]:
        return list(DistributedSampler(list(range(10)), seed=3))

    for rank, found in enumerate(hvd.run_on_threads(body, 3)):
        sampler = torch.utils.data.DistributedSampler(range(10), 3, rank, seed=3)
        assert found == list(sampler)


def test_what_is_refused() -> None:
    def body() -> None:
        with pytest.raises(InputError, match="no parameter requires a gradient"):
            DistributedDataParallel(torch.nn.Tanh())
        with pytest.raises(InputError, match="a tensor is on meta"):
            DistributedDataParallel(torch.nn.Linear(2, 2, device="meta"))

    hvd.run_on_threads(body, 1)
