"""DistributedOptimizer of tensors, against torch's optimizer on the batches of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnxpar.base.errors import InputError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import onnxpar.hvd.torch as hvd  # noqa: E402

RANKS = 2


def drawn(seed: int, *shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def net() -> Any:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(index, *parameter.shape))
    return module


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def loss_of(module: Any, seed: int) -> Any:
    return module(drawn(seed, 3, 4)).square().mean()


def values(module: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def expected(
    steps: int,
    passes: int = 1,
    make: Callable[[Any], Any] = sgd,
    between: Callable[[Any], None] = lambda module: None,
    weight: float = 1 / RANKS,
) -> list[Any]:
    """The parameters after steps by the gradients of all ranks, added up with a weight."""
    module = net()
    optimizer = make(module)
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(passes * RANKS):
            (loss_of(module, 100 * step + each) * weight).backward()
        between(module)
        optimizer.step()
    return values(module)


def backward(module: Any, step: int, passes: int = 1) -> None:
    for each in range(passes):
        loss_of(module, 100 * step + each * RANKS + hvd.rank()).backward()


def close(found: list[Any], wanted: list[Any], tolerance: float = 1e-11) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def on_ranks(body: Callable[[], Any]) -> list[Any]:
    return hvd.run_on_threads(body, RANKS)


def adam(module: Any) -> Any:
    return torch.optim.AdamW(
        [{"params": module[0].parameters(), "lr": 0.02}, {"params": module[2].parameters()}], 0.01
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an average": ({}, {}),
    "a sum": ({"op": hvd.Sum}, {"weight": 1.0}),
    "Adam": ({}, {"make": adam}),
    "several passes": ({"backward_passes_per_step": 3}, {"passes": 3}),
    "a divisor before the sum": ({"gradient_predivide_factor": 2.0}, {}),
    "two groups": ({"num_groups": 2}, {}),
    "a group": ({"groups": [[0, 3]]}, {}),
    "names": ({"named_parameters": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(case: str) -> None:
    options, reference = CASES[case]
    wanted = expected(3, **reference)
    passes = options.get("backward_passes_per_step", 1)

    def body() -> None:
        module = net()
        given = dict(options)
        if "groups" in given:
            parameters = list(module.parameters())
            given["groups"] = [[parameters[index] for index in group] for group in given["groups"]]
        if "named_parameters" in given:
            given["named_parameters"] = module.named_parameters()
        inner = reference.get("make", sgd)(module)
        optimizer = hvd.DistributedOptimizer(inner, **given)
        assert isinstance(optimizer, type(inner))
        for step in range(3):
            optimizer.zero_grad()
            backward(module, step, passes)
            optimizer.step()
        close(values(module), wanted)

    on_ranks(body)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("skips", [True, False])
def test_clipping_as_in_horovods_documentation(passes: int, skips: bool) -> None:
    """`synchronize` reduces the gradients of all passes, and `step` does not do it again."""

    def clip(module: Any) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    wanted = expected(2, passes, between=clip)

    def body() -> None:
        module = net()
        optimizer = hvd.DistributedOptimizer(sgd(module), backward_passes_per_step=passes)
        for step in range(2):
            backward(module, step, passes)
            optimizer.synchronize()
            clip(module)
            if skips:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        close(values(module), wanted)

    on_ranks(body)


def test_a_step_before_all_passes_and_another_number_of_them() -> None:
    wanted = expected(2, 2)

    def body() -> None:
        module = net()
        optimizer = hvd.DistributedOptimizer(sgd(module), backward_passes_per_step=3)
        for step in range(2):
            backward(module, step, 2)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.set_backward_passes_per_step(2)
        close(values(module), wanted)

    on_ranks(body)


@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_closures(name: str) -> None:
    def stepped(
        module: Any, seeds: list[int], wrap: Callable[[Any], Any] = lambda x: x
    ) -> list[Any]:
        optimizer = wrap(getattr(torch.optim, name)(module.parameters(), lr=0.1))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum(loss_of(module, seed) for seed in seeds) / len(seeds)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return values(module)

    wanted = stepped(net(), [0, 1])

    def body() -> None:
        close(stepped(net(), [hvd.rank()], hvd.DistributedOptimizer), wanted)

    on_ranks(body)


def test_a_scheduler_a_state_and_a_new_group() -> None:
    def run(module: Any, optimizer: Any, each: Callable[[int], None]) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            if step == 1:
                module[2].requires_grad_(True)
                optimizer.add_param_group({"params": module[2].parameters(), "lr": 0.05})
            if step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            each(step)
            optimizer.step()
            scheduler.step()

    def make() -> Any:
        module = net()
        module[2].requires_grad_(False)
        return module, torch.optim.SGD(module[0].parameters(), lr=0.1, momentum=0.9)

    alone, inner = make()
    run(
        alone,
        inner,
        lambda step: sum(loss_of(alone, 100 * step + r) / 2 for r in range(2)).backward(),
    )

    def body() -> None:
        module, inner = make()
        run(module, hvd.DistributedOptimizer(inner), lambda step: backward(module, step))
        close(values(module), values(alone))

    on_ranks(body)


def test_an_optimizer_that_has_stepped_keeps_its_state() -> None:
    wanted = expected(2)

    def body() -> None:
        module = net()
        optimizer = sgd(module)
        sum(loss_of(module, rank) / 2 for rank in range(2)).backward()
        optimizer.step()
        optimizer = hvd.DistributedOptimizer(optimizer)
        optimizer.zero_grad()
        backward(module, 1)
        optimizer.step()
        close(values(module), wanted)

    on_ranks(body)


def test_what_no_rank_has_used_does_not_move() -> None:
    def run(module: Any, optimizer: Any, ranks: list[int]) -> list[Any]:
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                x = module[0](drawn(10 * step + rank, 3, 4)).mean()
                if step == 0 and rank == 1:
                    x = x + module[2](drawn(rank, 1, 5)).mean()
                (x / len(ranks)).backward()
            optimizer.step()
        return values(module)

    alone = net()
    wanted = run(alone, sgd(alone), [0, 1])

    def body() -> None:
        module = net()
        close(run(module, hvd.DistributedOptimizer(sgd(module)), [hvd.rank()]), wanted)

    on_ranks(body)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool) -> None:
    ids = [torch.tensor([0, 2, 2]), torch.tensor([2, 3, 0])]

    def table() -> Any:
        module = nn.Embedding(5, 2, sparse=True)
        with torch.no_grad():
            module.weight.copy_(drawn(0, 5, 2))
        return module

    alone = table()
    (sum(alone(each).square().sum() for each in ids) / 2).backward()

    def body() -> None:
        module = table()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=1.0), sparse_as_dense=as_dense
        )
        module(ids[hvd.rank()]).square().sum().backward()
        optimizer.synchronize()
        grad = module.weight.grad
        assert grad.is_sparse is not as_dense
        torch.testing.assert_close(grad.to_dense(), alone.weight.grad.to_dense())

    on_ranks(body)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression(compression: str) -> None:
    wanted = expected(2)

    def body() -> None:
        module = net()
        optimizer = hvd.DistributedOptimizer(
            sgd(module), compression=getattr(hvd.Compression, compression)
        )
        for step in range(2):
            optimizer.zero_grad()
            backward(module, step)
            optimizer.step()
        close(values(module), wanted, 1e-2)
        assert not torch.equal(values(module)[0], wanted[0])

    on_ranks(body)


def test_adasum_combines_the_updates() -> None:
    """Of orthogonal updates, Adasum is the sum; of equal ones, the average."""

    def body() -> list[list[float]]:
        module = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(module.parameters(), lr=0.5), op=hvd.Adasum
        )
        (module[0][hvd.rank()] + module[1].sum()).backward()
        optimizer.step()
        with (
            pytest.raises(InputError, match="Adasum combines updates inside step"),
            optimizer.skip_synchronize(),
        ):
            pass
        return [parameter.tolist() for parameter in module]

    for found in on_ranks(body):
        assert found[0] == pytest.approx([-0.5, -0.5], rel=1e-5)
        assert found[1] == pytest.approx([-0.5, -0.5], rel=1e-5)


def test_ranks_that_have_joined_count_as_zeros() -> None:
    """With cycles, as in Horovod: averages divide by the number of all ranks."""
    alone = net()
    inner = sgd(alone)
    for step in range(3):
        inner.zero_grad()
        for rank in range(RANKS):
            if step < 2 + rank:
                (loss_of(alone, 100 * step + rank) / RANKS).backward()
        inner.step()

    def body() -> None:
        hvd.init(cycle_time_ms=0)
        module = net()
        optimizer = hvd.DistributedOptimizer(sgd(module))
        for step in range(2 + hvd.rank()):
            optimizer.zero_grad()
            backward(module, step)
            optimizer.step()
        assert hvd.join() == 1
        hvd.broadcast_parameters(module.state_dict(), 1)
        close(values(module), values(alone))

    on_ranks(body)


def test_an_elastic_state() -> None:
    """It goes back to the last commit, and takes that of the rank that has committed most."""
    wanted = expected(2)

    def body() -> None:
        module = net()
        optimizer = hvd.DistributedOptimizer(sgd(module))
        state = hvd.elastic.TorchState(module, optimizer, batch=0)

        def step() -> None:
            optimizer.zero_grad()
            backward(module, state.batch)
            optimizer.step()
            state.batch += 1

        step()
        state.commit()
        step()
        if hvd.rank():
            with torch.no_grad():
                module[0].weight.fill_(9.0)
            state.save()
            state.batch, state._commits = 7, 0
        else:
            state.restore()
        state.sync()
        assert state.batch == 1
        step()
        close(values(module), wanted)

    on_ranks(body)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise ArithmeticError("in the backward pass")


@pytest.mark.parametrize("passes", [1, 2])
def test_after_an_exception_in_a_backward_pass(passes: int) -> None:
    wanted = expected(2, passes)

    def body() -> None:
        module = net()
        optimizer = hvd.DistributedOptimizer(sgd(module), backward_passes_per_step=passes)
        for step in range(2):
            with pytest.raises(ArithmeticError):
                module[2](Fails.apply(module[1](module[0](drawn(9, 3, 4))))).sum().backward()
            optimizer.zero_grad()
            backward(module, step, passes)
            optimizer.step()
            optimizer.zero_grad()
        close(values(module), wanted)

    on_ranks(body)


def test_after_gradients_that_differ_between_ranks() -> None:
    """The error of the collective is raised on every rank, and the ranks go on."""
    wanted = expected(1)

    def body() -> None:
        module = net().to(torch.float64 if hvd.rank() else torch.float32)
        optimizer = hvd.DistributedOptimizer(sgd(module), module.named_parameters())
        module(torch.ones(1, 4, dtype=module[0].weight.dtype)).sum().backward()
        with pytest.raises(InputError, match=r"rank 0 has '0\.bias' float32"):
            optimizer.step()
        module.to(torch.float64).load_state_dict(net().state_dict())
        optimizer.zero_grad()
        backward(module, 0)
        optimizer.step()
        close(values(module), wanted)

    on_ranks(body)


def test_what_is_refused() -> None:
    def body() -> None:
        module = net()
        with pytest.raises(InputError, match="backward_passes_per_step=0 must be at least 1"):
            hvd.DistributedOptimizer(sgd(module), backward_passes_per_step=0)
        with pytest.raises(InputError, match="gradient_predivide_factor needs op"):
            hvd.DistributedOptimizer(sgd(module), op=hvd.Sum, gradient_predivide_factor=2.0)
        pairs = list(module.named_parameters())
        with pytest.raises(InputError, match="parameter 3 of group 0 of the optimizer is not"):
            hvd.DistributedOptimizer(sgd(module), pairs[:3])
        with pytest.raises(InputError, match="two parameters are called 'w'"):
            hvd.DistributedOptimizer(sgd(module), [("w", p) for _, p in pairs])
        with pytest.raises(InputError, match="give pairs of a name and a parameter"):
            hvd.DistributedOptimizer(sgd(module), list(module.parameters()))
        with pytest.raises(InputError, match="a tensor is in two groups"):
            hvd.DistributedOptimizer(sgd(module), groups=[[pairs[0][1]], [pairs[0][1]]])
        optimizer = hvd.DistributedOptimizer(sgd(module), pairs)
        with pytest.raises(InputError, match="cannot be copied; wrap a copy of the inner one"):
            copy.deepcopy(optimizer)
        backward(module, 0)
        with pytest.raises(InputError, match=r"zero_grad\(\) before step\(\) or synchronize\(\)"):
            optimizer.zero_grad()
        with pytest.raises(InputError, match=r"'2\.(weight|bias)' has had 2 gradients since"):
            backward(module, 0)

    on_ranks(body)
