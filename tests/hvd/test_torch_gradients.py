"""Gradients of a DistributedDataParallel against the mean of those of PyTorch by rank."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError, RankError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from onnxpar.hvd.torch import DistributedDataParallel, allreduce  # noqa: E402

RANKS = 2


def drawn(seed: int, *shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype("f4"))


def net() -> Any:
    """A model whose parameters do not depend on the random numbers that threads share."""
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(index, *parameter.shape))
    return module


class Calls(nn.Module):
    """A module with parts, which runs a function of itself."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


class Expands(torch.autograd.Function):
    """The sum of a tensor, whose gradient is one number for all elements."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.expand(ctx.shape)


def twice(module: Any, x: Any) -> Any:
    for _ in range(2):
        x = checkpoint(module.part, x, use_reentrant=True)
    return x


def inside(reentrant: bool) -> Callable[..., Any]:
    def run(module: Any, x: Any) -> Any:
        middle = checkpoint(module.part, torch.tanh(module.first(x)), use_reentrant=reentrant)
        return checkpoint(module.last, middle, use_reentrant=reentrant)

    return run


def tied(module: Any, ids: Any) -> Any:
    return module.table(ids) @ module.table.weight.t()


def parameter(x: Any) -> Any:
    return nn.Parameter(x)


def x_of(*shape: int) -> Callable[[int], Any]:
    return lambda seed: drawn(seed, *shape)


def ids_of(seed: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 7, (2, 3)))


def ids_or_numbers(module: Any, seed: int) -> Any:
    """Looks rows of the table up on the second rank alone."""
    return module.table(ids_of(seed)) if seed % RANKS else module.other(drawn(seed, 1, 3))


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "a chain": (net, x_of(3, 4)),
    "channels last": (
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        x_of(2, 3, 5, 5),
    ),
    "a transposed weight": (
        lambda: Calls(lambda m, x: x @ m.w, w=parameter(drawn(0, 3, 4).t())),
        x_of(2, 4),
    ),
    "an expanded gradient": (
        lambda: Calls(lambda m, x: Expands.apply(m.w) * x.sum(), w=parameter(drawn(0, 3))),
        x_of(2),
    ),
    "a scalar": (lambda: Calls(lambda m, x: m.w * x, w=parameter(torch.tensor(2.0))), x_of(2)),
    "sparse rows": (lambda: nn.Embedding(7, 2, sparse=True), ids_of),
    "a sparse bag": (lambda: nn.EmbeddingBag(7, 2, mode="sum", sparse=True), ids_of),
    "sparse and dense": (lambda: Calls(tied, table=nn.Embedding(7, 2, sparse=True)), ids_of),
    "sparse on one rank": (
        lambda: Calls(ids_or_numbers, table=nn.Embedding(7, 2, sparse=True), other=nn.Linear(3, 2)),
        lambda seed: seed,
    ),
    "complex": (
        lambda: Calls(lambda m, x: (m.w * x).abs(), w=parameter(torch.ones(3) + 2j)),
        x_of(2, 3),
    ),
    "a conjugate": (
        lambda: Calls(
            lambda m, x: (m.w * x + m.w**2).imag, w=parameter((torch.ones(3) + 2j).conj())
        ),
        x_of(2, 3),
    ),
    "a shared layer": (
        lambda: Calls(lambda m, x: m.b(torch.tanh(m.a(x))), a=(a := nn.Linear(4, 4)), b=a),
        x_of(3, 4),
    ),
    "an LSTM": (lambda: Calls(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(3, 4, 2)), x_of(5, 2, 3)),
    "a checkpoint": (
        lambda: Calls(
            inside(False), first=nn.Linear(4, 4), part=nn.Linear(4, 4), last=nn.Linear(4, 2)
        ),
        x_of(3, 4),
    ),
    "a reentrant checkpoint": (
        lambda: Calls(
            inside(True), first=nn.Linear(4, 4), part=nn.Linear(4, 4), last=nn.Linear(4, 2)
        ),
        x_of(3, 4),
    ),
    "a layer in two reentrant checkpoints": (
        lambda: Calls(twice, part=nn.Linear(4, 4)),
        lambda seed: drawn(seed, 3, 4).requires_grad_(),
    ),
    "evaluation": (lambda: nn.Sequential(nn.BatchNorm1d(4), net()).eval(), x_of(3, 4)),
    "results in a dict": (
        lambda: Calls(lambda m, x: {"y": [m.a(x)]}["y"][0], a=nn.Linear(4, 2)),
        x_of(3, 4),
    ),
    "float64": (lambda: net().double(), lambda seed: drawn(seed, 3, 4).double()),
}


def backward(module: Any, x: Any) -> None:
    out = module(x)
    (out * torch.arange(1, out.numel() + 1).reshape(out.shape)).sum().backward()


def gradients(module: Any) -> list[Any]:
    def dense(grad: Any) -> Any:
        return None if grad is None else grad.detach().to_dense().clone()

    return [dense(parameter.grad) for parameter in module.parameters()]


def mean_of(prototype: Any, inputs: list[Any]) -> list[Any]:
    """What the gradients of plain modules are on average; None counts as 0 beside others."""
    every = []
    for x in inputs:
        module = copy.deepcopy(prototype)
        backward(module, x)
        every.append(gradients(module))
    return [
        None
        if all(g is None for g in each)
        else sum(0 if g is None else g for g in each) / len(each)
        for each in zip(*every, strict=True)
    ]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert [g is None for g in found] == [g is None for g in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-5)


def assert_averages(parallel: Any, seed: int) -> None:
    """On every rank: that a pass leaves the averages."""
    parallel.zero_grad()
    backward(parallel, drawn(seed + hvd.rank(), 3, 4))
    alone = copy.deepcopy(parallel.module)
    alone.zero_grad()
    expected = mean_of(alone, [drawn(seed + rank, 3, 4) for rank in range(hvd.size())])
    assert_equal(gradients(parallel), expected)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_averages(case: str) -> None:
    make, data = CASES[case]
    torch.manual_seed(0)
    prototype = make()
    passes = [[data(RANKS * step + rank) for rank in range(RANKS)] for step in range(3)]
    expected = [mean_of(prototype, inputs) for inputs in passes]

    def body() -> None:
        parallel = DistributedDataParallel(copy.deepcopy(prototype), bucket_cap_mb=0)
        for step, inputs in enumerate(passes):
            parallel.zero_grad(set_to_none=step != 1)
            backward(parallel, inputs[hvd.rank()])
            assert_equal(gradients(parallel), expected[step])

    hvd.run_on_threads(body, RANKS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_module_that_changes_its_dtype(dtype: str) -> None:
    def body() -> None:
        parallel = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        for each in ("float32", dtype):
            parallel.to(getattr(torch, each))
            parallel.zero_grad()
            parallel(torch.full((1, 2), 1.0 + hvd.rank(), dtype=getattr(torch, each))).backward()
            assert parallel.module.weight.grad.tolist() == [[1.5, 1.5]]
            assert parallel.module.weight.grad.dtype == getattr(torch, each)

    hvd.run_on_threads(body, RANKS)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise ArithmeticError("in the backward pass")


def failing_hook(_: Any) -> None:
    raise ArithmeticError("in a hook")


def fail(parallel: Any, where: str) -> None:
    x, layers = drawn(hvd.rank(), 3, 4), parallel.module
    if where == "backward":
        layers[2](Fails.apply(layers[1](layers[0](x)))).sum().backward()
    elif where == "forward":
        parallel(x[:, :3])
    elif where == "behind the last bucket":
        hook = layers[0].weight.register_post_accumulate_grad_hook(failing_hook)
        try:
            parallel(x).sum().backward()
        finally:
            hook.remove()
    else:
        hidden = parallel.module[0].register_forward_hook(
            lambda _, __, out: out.register_hook(failing_hook) and None
        )
        try:
            parallel(x).sum().backward()
        finally:
            hidden.remove()


@pytest.mark.parametrize("bucket_cap_mb", [25, 0])
def test_after_an_exception_on_all_ranks(bucket_cap_mb: float) -> None:
    def body() -> None:
        parallel = DistributedDataParallel(net(), bucket_cap_mb=bucket_cap_mb)
        assert_averages(parallel, 0)
        for seed, where in enumerate(("backward", "forward", "behind the last bucket", "a hook")):
            with pytest.raises((ArithmeticError, RuntimeError)):
                fail(parallel, where)
            for step in range(2):
                assert_averages(parallel, 10 * seed + step)

    hvd.run_on_threads(body, RANKS)


def test_a_rank_that_fails_alone_and_goes_on_is_found_out() -> None:
    """Its next gradients would be averaged with those of a step that the others began before."""

    def body() -> str:
        parallel = DistributedDataParallel(net())
        assert_averages(parallel, 0)
        with pytest.raises(RankError, match="disagree") as raised:
            if hvd.rank() == 1:
                with pytest.raises(ArithmeticError):
                    fail(parallel, "backward")
            for step in range(2):
                assert_averages(parallel, step)
        return str(raised.value)

    for message in hvd.run_on_threads(body, RANKS, timeout=10):
        assert "backward pass 2, bucket 0" in message and "backward pass 3, bucket 0" in message


def test_after_gradients_that_differ_between_ranks() -> None:
    """The error of the collective is raised on every rank, and the ranks go on."""

    def body() -> None:
        parallel = DistributedDataParallel(net(), bucket_cap_mb=0)
        parallel.module.to(torch.float64 if hvd.rank() else torch.float32)
        with pytest.raises(InputError, match=r"rank 0 has '2\.bias' float32\[2\], but rank 1 has"):
            backward(parallel, drawn(0, 3, 4).to(parallel.module[0].weight.dtype))
        parallel.module.to(torch.float32)
        assert_averages(parallel, 1)

    hvd.run_on_threads(body, RANKS)


@pytest.mark.parametrize("sparse", [True, False])
def test_with_cycles(sparse: bool) -> None:
    def body() -> None:
        hvd.init(cycle_time_ms=0)
        parallel = DistributedDataParallel(nn.Embedding(3, 1, sparse=sparse))
        for _ in range(2):
            parallel.zero_grad()
            parallel(torch.tensor([hvd.rank(), 2])).sum().backward()
            assert parallel.module.weight.grad.to_dense().tolist() == [[0.5], [0.5], [1.0]]

    hvd.run_on_threads(body, RANKS)


def reloaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_file_of_a_wrapper_without_ranks() -> None:
    def body() -> bytes:
        file = io.BytesIO()
        torch.save(DistributedDataParallel(net()), file)
        return file.getvalue()

    (data,) = hvd.run_on_threads(body, 1)
    module = torch.load(io.BytesIO(data), weights_only=False).eval()
    with torch.no_grad():
        x = drawn(0, 3, 4)
        assert torch.equal(module(x), net()(x))


def test_copies_average_their_own_gradients() -> None:
    def body() -> None:
        parallel = DistributedDataParallel(net())
        assert_averages(parallel, 0)
        before = gradients(parallel)
        for made in (copy.deepcopy, reloaded):
            copied = made(parallel)
            for step in range(2):
                assert_averages(copied, 1 + step)
        assert_equal(gradients(parallel), before)
        copied.load_state_dict(parallel.state_dict())
        assert_averages(copied, 3)
        assert_averages(parallel, 4)

    hvd.run_on_threads(body, RANKS)


def test_parameters_that_are_frozen_unfrozen_or_new() -> None:
    def body() -> None:
        parallel = DistributedDataParallel(net().requires_grad_(False).append(nn.Linear(2, 2)))
        for step, (first, last) in enumerate([(False, True), (True, True), (True, False)]):
            parallel.module[0].requires_grad_(first)
            parallel.module[3].requires_grad_(last)
            assert_averages(parallel, step)
        with torch.no_grad():
            parallel.module[3] = nn.Linear(2, 3)
            parallel.module[3].weight.fill_(1.0 + hvd.rank())
        assert_averages(parallel, 3)
        assert parallel.module[3].weight.tolist() == [[1.0, 1.0]] * 3

    torch.manual_seed(0)
    hvd.run_on_threads(body, RANKS)


def test_what_no_rank_has_used_does_not_move() -> None:
    """As in one process, also by momentum and weight decay."""

    def stepped(module: Any, x: Any) -> list[Any]:
        options: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        optimizer = torch.optim.SGD(module.parameters(), **options)
        for use in (True, False, True, False):
            optimizer.zero_grad()
            module(x, use).sum().backward()
            optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    def make() -> Any:
        run = lambda m, x, use: x * m.a + (x * m.b if use else 0)  # noqa: E731
        return Calls(run, a=parameter(torch.ones(3)), b=parameter(torch.ones(3)))

    expected = stepped(make(), torch.ones(3) * 1.5)

    def body() -> list[Any]:
        return stepped(DistributedDataParallel(make()), torch.ones(3) * (1.0 + hvd.rank()))

    for found in hvd.run_on_threads(body, RANKS):
        assert_equal(found, expected)


@pytest.mark.parametrize("forward,outer", [("inside", True), ("outside", False)])
def test_the_forward_pass_decides_whether_to_average(forward: str, outer: bool) -> None:
    """As torch documents it for no_sync."""

    def body() -> list[float]:
        parallel = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), 1.0 + hvd.rank())
        if forward == "inside":
            with parallel.no_sync():
                out = parallel(x)
            out.backward()
        else:
            out = parallel(x)
            with parallel.no_sync():
                out.backward()
        first = float(parallel.module.weight.grad)
        parallel(x).backward()
        return [first, float(parallel.module.weight.grad)]

    own = [1.0, 2.0] if outer else [1.5, 1.5]
    assert hvd.run_on_threads(body, RANKS) == [[own[rank], 3.0] for rank in range(RANKS)]


def test_two_passes_through_one_graph() -> None:
    def body() -> float:
        parallel = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        out = parallel(torch.full((1, 1), 1.0 + hvd.rank()))
        out.backward(retain_graph=True)
        out.backward()
        return float(parallel.module.weight.grad)

    assert hvd.run_on_threads(body, RANKS) == [3.0] * RANKS


def test_several_modules_and_a_module_wrapped_again() -> None:
    def body() -> None:
        one, other = DistributedDataParallel(net()), DistributedDataParallel(net())
        for step in range(2):
            assert_averages(one, step)
            assert_averages(other, step)
            x = drawn(step + hvd.rank(), 3, 4)
            one.zero_grad()
            other.zero_grad()
            (one(x).sum() + other(x).sum()).backward()
            assert_equal(gradients(one), gradients(other))
        one = DistributedDataParallel(one.module)
        hooks = [len(p._post_accumulate_grad_hooks) for p in one.module.parameters()]
        assert hooks == [1] * 4, "those of the first wrapper are gone"
        assert_averages(one, 5)

    hvd.run_on_threads(body, RANKS)


def test_a_gradient_that_comes_again_after_it_was_sent() -> None:
    def run(module: Any, x: Any, times: int) -> Any:
        for _ in range(times):
            x = checkpoint(module.part, x, use_reentrant=True)
        return x

    def body() -> None:
        parallel = DistributedDataParallel(Calls(run, part=nn.Linear(2, 2)))
        x = torch.ones(1, 2, requires_grad=True)
        parallel(x, 1).sum().backward()
        with pytest.raises(InputError, match=r"'part\.(weight|bias)' has a gradient again"):
            parallel(x, 2).sum().backward()

    hvd.run_on_threads(body, RANKS)


BUFFERS = ["bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64", "float8_e5m2"]


@pytest.mark.parametrize("dtype", BUFFERS)
def test_buffers_of_all_dtypes(dtype: str) -> None:
    def body() -> Any:
        def run(module: Any, x: Any) -> Any:
            module.seen.copy_((x * (1 + 2 * hvd.rank())).detach().to(module.seen.dtype))
            return module.part(x)

        module = Calls(run, part=nn.Linear(2, 2))
        module.register_buffer("seen", torch.zeros(2, 2).to(getattr(torch, dtype)).t())
        parallel = DistributedDataParallel(module)
        parallel(torch.ones(2, 2)).sum().backward()
        return module.seen.to(torch.complex64).real.tolist()

    assert hvd.run_on_threads(body, RANKS) == [[[1.0, 1.0]] * 2] * RANKS


def stepped(module: Any, steps: Any) -> list[Any]:
    """The parameters after steps by gradients that `steps` makes."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for make in steps:
        optimizer.zero_grad()
        make(module)
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("by_all", [True, False])
def test_ranks_with_different_numbers_of_steps(by_all: bool) -> None:
    """As torch documents it for join: the others go on, and all end with their parameters."""

    def loss(module: Any, step: int, rank: int) -> Any:
        return module(drawn(10 * step + rank, 3, 4)).square().sum()

    def whole(step: int) -> Callable[[Any], None]:
        have = [rank for rank in range(3) if step < 1 + 2 * rank]
        divisor = 3 if by_all else len(have)
        return lambda m: sum(loss(m, step, rank) / divisor for rank in have).backward()

    expected = stepped(net(), [whole(step) for step in range(5)])

    def body() -> list[Any]:
        parallel = DistributedDataParallel(net(), bucket_cap_mb=0)
        assert_averages(parallel, 0)
        count = 1 + 2 * hvd.rank()
        with parallel.join(divide_by_initial_world_size=by_all):
            stepped(
                parallel,
                [lambda m, s=step: loss(m, s, hvd.rank()).backward() for step in range(count)],
            )
        assert_averages(parallel, 1)
        with parallel.join(enable=False):
            return [p.detach().clone() for p in parallel.parameters()]

    for found in hvd.run_on_threads(body, 3):
        assert_equal(found, expected)


def test_buffers_of_ranks_with_different_numbers_of_steps() -> None:
    norm = nn.BatchNorm1d(4)
    for step in range(3):
        norm(drawn(10 * step + 1, 3, 4))

    def body() -> list[Any]:
        parallel = DistributedDataParallel(nn.BatchNorm1d(4))
        with parallel.join():
            for step in range(1 + 2 * hvd.rank()):
                parallel(drawn(10 * step + hvd.rank(), 3, 4)).sum().backward()
        return list(parallel.buffers())

    for found in hvd.run_on_threads(body, RANKS):
        for one, other in zip(found, norm.buffers(), strict=True):
            torch.testing.assert_close(one, other)


def test_a_hook_in_the_place_of_the_average() -> None:
    def halved(seen: list[Any], bucket: Any) -> Any:
        parts = [list(part.shape) for part in bucket.gradients()]
        assert parts == [list(p.shape) for p in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), parts))
        future = torch.futures.Future()
        future.set_result(allreduce(bucket.buffer().half()).float() / 2)
        return future

    def body() -> list[Any]:
        parallel, seen = DistributedDataParallel(net(), bucket_cap_mb=0), []
        parallel.register_comm_hook(seen, halved)
        x = drawn(hvd.rank(), 3, 4)
        backward(parallel, x)
        expected = mean_of(net(), [drawn(rank, 3, 4) for rank in range(RANKS)])
        for found, wanted in zip(gradients(parallel), expected, strict=True):
            torch.testing.assert_close(found, wanted / 2, rtol=2e-3, atol=2e-2)
        parallel.register_comm_hook(None, lambda _, bucket: allreduce(bucket.buffer()))
        assert_averages(parallel, 2)
        return seen

    shapes = [[2], [2, 5], [5], [5, 4]]
    wanted = [(index, index == 3, [shape]) for index, shape in enumerate(shapes)]
    assert hvd.run_on_threads(body, RANKS) == [wanted] * RANKS


def test_a_hook_and_what_it_excludes() -> None:
    def body() -> None:
        table = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
        table.register_comm_hook(None, lambda _, bucket: bucket.buffer())
        with pytest.raises(InputError, match="cannot reduce the sparse gradient of 'weight'"):
            table(torch.tensor([1])).sum().backward()
        compressed = DistributedDataParallel(net(), compression=hvd.Compression.fp16)
        with pytest.raises(InputError, match="a hook takes the place of compression"):
            compressed.register_comm_hook(None, lambda _, bucket: bucket.buffer())

    hvd.run_on_threads(body, RANKS)


def test_options_of_torch() -> None:
    def body() -> None:
        options = {"find_unused_parameters": True, "static_graph": True}
        parallel = DistributedDataParallel(net(), gradient_as_bucket_view=True, **options)
        assert_averages(parallel, 0)

    hvd.run_on_threads(body, RANKS)
