"""The models of peer_models.py in JAX, split over two CPU devices: weights have Megatron's layouts,
and XLA's partitioner adds the collectives."""

from __future__ import annotations

import os
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.peer_models import RANKS, Case, Feeds, weights_of
from bench.peers import Run
from bench.rivals import BERT, LLAMA

TABLES = ("words", "embed")
"""Whole on both devices: faster here than split by rows."""


def devices(stack: ExitStack, case: Case, model: Path, feeds: Feeds) -> Run:
    """The model, compiled for two devices of this host."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((RANKS,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    asked = BERT if case.kind == "bert" else LLAMA

    def place(name: str, array: np.ndarray) -> Any:
        layouts = [layout for glob, layout in asked.items() if fnmatchcase(name, glob)]
        axes = layouts[0] if layouts and name not in TABLES else []
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    weights = {name: place(name, array) for name, array in weights_of(model).items()}
    forward = jax.jit(partial(bert if case.kind == "bert" else llama, case))
    ints = {name: a.astype("i4") if a.dtype == np.int64 else a for name, a in feeds.items()}
    return lambda: np.asarray(forward(weights, ints))


def bert(case: Case, w: dict[str, Any], fed: dict[str, Any]) -> Any:
    """model_shapes.bert."""
    import jax
    import jax.numpy as jnp

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.w"] + w[f"{name}.b"]

    def norm(x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        return centred * scale * w[f"{name}.w"] + w[f"{name}.b"]

    shape = (case.batch, case.seq, case.heads, case.width // case.heads)
    x = w["words"][fed["input_ids"]] + w["kinds"][fed["token_type_ids"]] + w["places"]
    x = norm(x, "norm")
    mask = jnp.log(fed["mask"])[:, None, None, :]
    for i in range(case.layers):
        q, k, v = (linear(x, f"{part}.{i}").reshape(shape) for part in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * shape[-1] ** -0.5 + mask
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = norm(x + linear(out, f"o.{i}"), f"norm1.{i}")
        h = jax.nn.gelu(linear(x, f"up.{i}"), approximate=True)
        x = norm(x + linear(h, f"down.{i}"), f"norm2.{i}")
    return linear(jnp.tanh(linear(x[:, 0], "pooler")), "classifier")


def llama(case: Case, w: dict[str, Any], fed: dict[str, Any]) -> Any:
    """llama_shape.write."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, name: str) -> Any:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    groups, depth = case.kv_heads, case.width // case.heads
    x = w["embed"][fed["input_ids"]]
    for i in range(case.layers):
        h = norm(x, f"norm1.{i}")
        q = (h @ w[f"q.{i}"]).reshape(case.batch, case.seq, groups, -1, depth)
        k, v = ((h @ w[f"{p}.{i}"]).reshape(case.batch, case.seq, groups, depth) for p in "kv")
        scores = jax.nn.softmax(jnp.einsum("bqghd,bkgd->bghqk", q, k) * depth**-0.5)
        out = jnp.einsum("bghqk,bkgd->bqghd", scores, v).reshape(x.shape)
        x = x + out @ w[f"o.{i}"]
        h = norm(x, f"norm2.{i}")
        h = jax.nn.silu(h @ w[f"gate.{i}"]) * (h @ w[f"up.{i}"])
        x = x + h @ w[f"down.{i}"]
    return norm(x, "norm") @ w["head"]
