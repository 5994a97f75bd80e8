// The part of a tensor that goes to, or comes from, one member of a group.
#pragma once

#include <cstddef>

namespace onnxpar {

/// Bytes `begin` to `begin + size` of something.
struct Range {
  size_t begin;
  size_t size;
};

/// Part `index` when `total` is cut into `parts`, the larger parts first.
Range PartOf(size_t total, size_t parts, size_t index);

/// `rows` runs of `row_bytes`, each `stride` bytes after the one before; the first is at `offset`.
struct Block {
  int member;  // of the group
  size_t offset;
  size_t rows;
  size_t row_bytes;
  size_t stride;

  size_t Bytes() const { return rows * row_bytes; }
  bool Contiguous() const { return rows <= 1 || row_bytes == stride; }
};

/// A block that is one run of bytes.
inline Block Run(int member, size_t bytes, size_t offset = 0) {
  return {member, offset, 1, bytes, bytes};
}

/// Copies a block to one of as many bytes, row-major on both sides.
void CopyBlock(const void* from, const Block& source, void* to, const Block& target);

/// Copies those bytes of a block, counted row-major, to contiguous memory.
void PackBlock(const void* from, const Block& source, const Range& range, void* to);

/// The inverse.
void UnpackBlock(const void* from, void* to, const Block& target, const Range& range);

}  // namespace onnxpar
