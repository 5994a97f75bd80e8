"""The training step of peer_models.py in PyTorch: with threads, and by DDP over Gloo."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from bench.peer_models import DECAY, RANKS, RATE, Case, weights_of
from bench.peers import Run


def threads(stack: ExitStack, case: Case, model: Path, count: int) -> Run:
    """Steps of one process; their losses."""
    step = steps(case, model, count)
    return lambda: float(step())


def steps(case: Case, model: Path, count: int, rank: int = 0, ranks: int = 1) -> Any:
    """A call that takes a step on a rank's part of the batch, and returns its loss."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(count)
    encoder = module(case, weights_of(model))
    trained = encoder
    if ranks > 1:
        trained = torch.nn.parallel.DistributedDataParallel(encoder, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        encoder.parameters(), lr=RATE, weight_decay=DECAY, fused=True, betas=(0.9, 0.999)
    )
    part = slice(rank * case.batch // ranks, (rank + 1) * case.batch // ranks)
    fed = {name: torch.from_numpy(array[part]) for name, array in case.feeds.items()}
    labels = torch.from_numpy(case.labels[part])

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(trained(fed), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def module(case: Case, weights: dict[str, np.ndarray]) -> Any:
    """model_shapes.bert, whose matrices lie as those of torch.nn.Linear."""
    import torch
    from torch.nn import functional as f

    shape = (case.seq, case.heads, case.width // case.heads)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, array in weights.items():
                lies = array.T.copy() if name.endswith(".w") and array.ndim == 2 else array
                parameter = torch.nn.Parameter(torch.from_numpy(lies))
                self.register_parameter(name.replace(".", "_"), parameter)

        def forward(self, fed: dict[str, Any]) -> Any:
            w = self._parameters

            def linear(x: Any, name: str) -> Any:
                return f.linear(x, w[f"{name}_w"], w[f"{name}_b"])

            def norm(x: Any, name: str) -> Any:
                return f.layer_norm(x, x.shape[-1:], w[f"{name}_w"], w[f"{name}_b"])

            x = f.embedding(fed["input_ids"], w["words"])
            x = x + f.embedding(fed["token_type_ids"], w["kinds"]) + w["places"]
            x = norm(x, "norm")
            mask = fed["mask"].log()[:, None, None, :]
            for i in range(case.layers):
                parts = (linear(x, f"{part}_{i}") for part in "qkv")
                q, k, v = (part.reshape(-1, *shape).transpose(1, 2) for part in parts)
                out = f.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                x = norm(x + linear(out.transpose(1, 2).flatten(2), f"o_{i}"), f"norm1_{i}")
                h = f.gelu(linear(x, f"up_{i}"), approximate="tanh")
                x = norm(x + linear(h, f"down_{i}"), f"norm2_{i}")
            return linear(linear(x[:, 0], "pooler").tanh(), "classifier")

    return Encoder()


def data_parallel(stack: ExitStack, case: Case, model: Path) -> Run:
    """DDP over processes of one thread: this one, and those that it starts; mean losses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    connections = []
    for rank in range(1, RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_follow, args=(theirs, case, model, rank, port))
        process.start()
        theirs.close()
        stack.callback(process.join)
        stack.callback(ours.close)
        connections.append(ours)
    step = _member(case, model, 0, port)

    def run() -> float:
        for connection in connections:
            connection.send(None)
        own = float(step())
        return float(np.mean([own, *(connection.recv() for connection in connections)]))

    return run


def _member(case: Case, model: Path, rank: int, port: int) -> Any:
    import torch.distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    return steps(case, model, 1, rank, RANKS)


def _follow(connection: Connection, case: Case, model: Path, rank: int, port: int) -> None:
    """Takes a step whenever rank 0 does."""
    step = _member(case, model, rank, port)
    try:
        while True:
            connection.recv()
            connection.send(float(step()))
    except EOFError:
        return
