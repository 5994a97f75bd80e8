// Slices of tensors along an axis.
#pragma once

#include <vector>

#include "block.h"
#include "ort.h"

namespace onnxpar {

/// Returns the axis as an index from 0; a negative axis counts from the end. Throws if `shape` does
/// not have the axis.
size_t NormalizeAxis(int64_t axis, const Shape& shape);

/// Returns `shape` with another size along `axis`.
Shape WithExtent(Shape shape, size_t axis, int64_t extent);

/// Returns `shape` without `axis`. In a collective along that axis, the members must agree on this
/// part of the shape.
Shape WithoutAxis(Shape shape, size_t axis);

/// Returns the sum. Throws if a size is negative, or if the sum overflows.
int64_t SumOf(const std::vector<int64_t>& sizes);

/// Returns the place of the elements `begin` to `begin + size` along `axis` of a tensor, as a block
/// for group member `member`.
Block SliceOf(const Shape& shape, size_t axis, size_t element_size, int member, int64_t begin,
              int64_t size);

/// Returns consecutive slices of a tensor along `axis`: for each group member i, a slice of
/// `sizes[i]` elements.
std::vector<Block> SlicesOf(const Shape& shape, size_t axis, size_t element_size,
                            const std::vector<int64_t>& sizes);

}  // namespace onnxpar
