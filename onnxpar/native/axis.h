// Cutting tensors along an axis.
#pragma once

#include <vector>

#include "block.h"
#include "ort.h"

namespace onnxpar {

/// Counts a negative axis from the end; throws if `shape` does not have it.
size_t NormalizeAxis(int64_t axis, const Shape& shape);

/// `shape` with another extent along `axis`.
Shape WithExtent(Shape shape, size_t axis, int64_t extent);

/// `shape` without that axis: the common part of the members' shapes in a collective along it.
Shape WithoutAxis(Shape shape, size_t axis);

/// The sum. Throws if a size is negative, or if the sum overflows.
int64_t SumOf(const std::vector<int64_t>& sizes);

/// The elements `begin` to `begin + size` along `axis` of a tensor.
Block SliceOf(const Shape& shape, size_t axis, size_t element_size, int member, int64_t begin,
              int64_t size);

/// The tensor cut along `axis` into one slice for each member of a group.
std::vector<Block> SlicesOf(const Shape& shape, size_t axis, size_t element_size,
                            const std::vector<int64_t>& sizes);

}  // namespace onnxpar
