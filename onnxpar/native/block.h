// Blocks: a block is the place in memory of the part of a tensor that is sent to, or received from,
// one group member.
#pragma once

#include <cstddef>

namespace onnxpar {

/// The bytes or elements `begin` to `begin + size`.
struct Range {
  size_t begin;
  size_t size;
};

/// Divides `total` into `parts` parts that are as equal as possible, larger ones first; returns
/// part number `index`.
Range PartOf(size_t total, size_t parts, size_t index);

/// A block has `rows` rows of `row_bytes` bytes; the first row begins at `offset`, and each next
/// row `stride` bytes later.
struct Block {
  int member;  // of the group
  size_t offset;
  size_t rows;
  size_t row_bytes;
  size_t stride;

  size_t Bytes() const { return rows * row_bytes; }
  bool Contiguous() const { return rows <= 1 || row_bytes == stride; }
};

/// Returns a block of contiguous bytes.
inline Block Run(int member, size_t bytes, size_t offset = 0) {
  return {member, offset, 1, bytes, bytes};
}

/// Copies a block to another block with the same number of bytes, row by row.
void CopyBlock(const void* from, const Block& source, void* to, const Block& target);

/// Copies the bytes `range` of a block, counted row by row, to contiguous memory.
void PackBlock(const void* from, const Block& source, const Range& range, void* to);

/// Copies contiguous memory to the bytes `range` of a block, the inverse of PackBlock.
void UnpackBlock(const void* from, void* to, const Block& target, const Range& range);

}  // namespace onnxpar
