// Slices of tensors along an axis.
#pragma once

#include <vector>

#include "block.h"
#include "ort.h"

namespace onnxpar {

/// Returns the axis as an index from 0: -1 becomes 2 for a shape of 3 dimensions. Throws if `shape`
/// does not have the axis.
size_t NormalizeAxis(int64_t axis, const Shape& shape);

/// Returns `shape` with the size `extent` along `axis`.
Shape WithExtent(Shape shape, size_t axis, int64_t extent);

/// Returns `shape` without the dimension `axis`: [4, 6, 8] without axis 1 is [4, 8]. The members of
/// a collective along `axis` must agree on these sizes only.
Shape WithoutAxis(Shape shape, size_t axis);

/// Returns the sum of `sizes`. Throws if a size is negative or the sum overflows, so it also checks
/// sizes that other ranks sent.
int64_t SumOf(const std::vector<int64_t>& sizes);

/// Returns the place in memory of the elements `begin` to `begin + size` - 1 along `axis` of a
/// tensor of shape `shape`, as a block that is exchanged with group member `member`.
Block SliceOf(const Shape& shape, size_t axis, size_t element_size, int member, int64_t begin,
              int64_t size);

/// Divides a tensor of shape `shape` along `axis` into consecutive slices, one for each group
/// member: slice i has `sizes[i]` elements along the axis. Returns the slices' places in memory.
std::vector<Block> SlicesOf(const Shape& shape, size_t axis, size_t element_size,
                            const std::vector<int64_t>& sizes);

}  // namespace onnxpar
