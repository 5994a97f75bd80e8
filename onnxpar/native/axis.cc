#include "axis.h"

#include <stdexcept>

namespace onnxpar {

size_t NormalizeAxis(int64_t axis, const Shape& shape) {
  const int64_t rank = static_cast<int64_t>(shape.size());
  if (axis < -rank || axis >= rank) {
    throw std::runtime_error("axis " + std::to_string(axis) + " is out of range for a tensor of " +
                             std::to_string(rank) + " dimensions, " + ToText(shape));
  }
  return static_cast<size_t>(axis < 0 ? axis + rank : axis);
}

Shape WithExtent(Shape shape, size_t axis, int64_t extent) {
  shape[axis] = extent;
  return shape;
}

Shape WithoutAxis(Shape shape, size_t axis) {
  shape.erase(shape.begin() + static_cast<ptrdiff_t>(axis));
  return shape;
}

int64_t SumOf(const std::vector<int64_t>& sizes) {
  int64_t sum = 0;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_add_overflow(sum, size, &sum)) {
      throw std::runtime_error("the ranks cannot have shards of sizes " + ToText(sizes) +
                               ": a size is negative, or the sum is too large");
    }
  }
  return sum;
}

Block SliceOf(const Shape& shape, size_t axis, size_t element_size, int member, int64_t begin,
              int64_t size) {
  size_t rows = 1;
  for (size_t i = 0; i < axis; ++i) rows *= static_cast<size_t>(shape[i]);
  size_t inner = element_size;
  for (size_t i = axis + 1; i < shape.size(); ++i) inner *= static_cast<size_t>(shape[i]);
  return {member, static_cast<size_t>(begin) * inner, rows, static_cast<size_t>(size) * inner,
          static_cast<size_t>(shape[axis]) * inner};
}

std::vector<Block> SlicesOf(const Shape& shape, size_t axis, size_t element_size,
                            const std::vector<int64_t>& sizes) {
  std::vector<Block> blocks;
  int64_t begin = 0;
  for (int64_t size : sizes) {
    const int member = static_cast<int>(blocks.size());
    blocks.push_back(SliceOf(shape, axis, element_size, member, begin, size));
    begin += size;
  }
  return blocks;
}

}  // namespace onnxpar
