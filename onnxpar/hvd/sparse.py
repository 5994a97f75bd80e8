"""Sparse tensors: rows of a larger array, for gradients of embeddings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.process_sets import Members
from onnxpar.hvd.reductions import Average, Reduction, Sum, is_float
from onnxpar.runtime.ranks import collectives


class IndexedSlices(NamedTuple):
    """A sparse array of shape `dense_shape`, as in TensorFlow: some rows, and zeros elsewhere.

    Row i of `values` is row `indices[i]` of the array; rows with equal indices are added. Without
    `dense_shape`, the shape is not known.
    """

    values: Array
    indices: Array
    dense_shape: tuple[int, ...] | None = None

    def merged(self) -> IndexedSlices:
        """Returns the same sparse array with each index once, in ascending order: rows of equal
        indices are added."""
        indices, places = np.unique(self.indices, return_inverse=True)
        values = np.zeros((len(indices), *self.values.shape[1:]), self.values.dtype)
        np.add.at(values, places.reshape(-1), self.values)
        return IndexedSlices(values, indices, self.dense_shape)

    def plus(self, other: IndexedSlices | None) -> IndexedSlices:
        """Returns the sum of this array and another of the same shape, if given."""
        if other is None:
            return self
        values = np.concatenate([self.values, other.values])
        return IndexedSlices(
            values, np.concatenate([self.indices, other.indices]), self.dense_shape
        )

    def dense(self, shape: tuple[int, ...] | None = None) -> Array:
        """Returns the array with its zeros, of shape `dense_shape`, or else `shape`. Errors:
        InputError if no shape is known, or if an index lies outside of it."""
        whole = self.dense_shape or shape
        if whole is None:
            raise InputError("a sparse tensor without dense_shape cannot become dense")
        if len(self.indices) and not 0 <= self.indices.min() <= self.indices.max() < whole[0]:
            raise InputError(f"a sparse tensor of shape {list(whole)} has an index outside of it")
        result = np.zeros(whole, self.values.dtype)
        np.add.at(result, self.indices, self.values)
        return result


def check_sparse(tensor: IndexedSlices, reduction: Reduction, what: str) -> IndexedSlices:
    """Returns the tensor, with values and indices that ranks can exchange. `what` names the call in
    errors. Errors: InputError for reductions other than Sum and Average, for factors other than 1,
    and for indices that do not fit the values."""
    if reduction.op not in (Average, Sum):
        raise InputError(f"{what}: sparse tensors can only be reduced by hvd.Sum and hvd.Average")
    if reduction.prescale_factor != 1 or reduction.postscale_factor != 1:
        raise InputError(f"{what}: prescale_factor and postscale_factor need a dense tensor")
    values = collectives.as_exchangeable(tensor.values, f"{what}, values")
    indices = collectives.as_exchangeable(tensor.indices, f"{what}, indices")
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or values.shape[:1] != indices.shape:
        raise InputError(
            f"{what}: indices of shape {list(indices.shape)} and {indices.dtype} do not number the "
            f"rows of values of shape {list(values.shape)}"
        )
    if reduction.op is Average and not is_float(values.dtype):
        raise InputError(f"{what}: an average of sparse tensors needs floats, not {values.dtype}")
    shape = tensor.dense_shape
    return IndexedSlices(values, indices, None if shape is None else tuple(shape))


def gather_sparse(
    members: Members, tensor: IndexedSlices, reduction: Reduction, name: str
) -> IndexedSlices:
    """Returns a sparse tensor with the rows of all members one after the other, divided by the
    number of members for Average."""
    world, details = members.world, f"op={reduction.op.name.capitalize()}"
    indices, _ = collectives.all_gather(world, tensor.indices, f"{name}.indices", details)
    values, _ = collectives.all_gather(world, tensor.values, f"{name}.values", details)
    if reduction.op is Average:
        values = values / values.dtype.type(members.size)
    return IndexedSlices(values, indices, tensor.dense_shape)
