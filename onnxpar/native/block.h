// Blocks: a block is the place in memory of the part of a tensor that is sent to, or received from,
// one group member.
#pragma once

#include <cstddef>

namespace onnxpar {

/// A range of bytes or of elements: `begin` to `begin + size` - 1.
struct Range {
  size_t begin;
  size_t size;
};

/// Divides `total` elements into `parts` parts as equal as possible, larger ones first, and returns
/// part number `index`: part 1 of 3 of 7 elements begins at 3 and has size 2.
Range PartOf(size_t total, size_t parts, size_t index);

/// The bytes of a tensor that go to, or come from, member `member`: `rows` rows of `row_bytes`
/// bytes. The first row begins at byte `offset` of the tensor, each further row `stride` bytes
/// after the row before.
struct Block {
  int member;  // of the group
  size_t offset;
  size_t rows;
  size_t row_bytes;
  size_t stride;

  size_t Bytes() const { return rows * row_bytes; }
  bool Contiguous() const { return rows <= 1 || row_bytes == stride; }
};

/// Returns a block of `bytes` contiguous bytes that begin at `offset`.
inline Block Run(int member, size_t bytes, size_t offset = 0) {
  return {member, offset, 1, bytes, bytes};
}

/// Copies the bytes of block `source` of the tensor `from` to block `target` of the tensor `to`.
/// Both blocks have the same number of bytes; their rows may have different lengths.
void CopyBlock(const void* from, const Block& source, void* to, const Block& target);

/// Copies the bytes `range` of a block of the tensor `from` to the contiguous memory `to`. The
/// range counts the bytes of the block row after row, without the gaps between rows.
void PackBlock(const void* from, const Block& source, const Range& range, void* to);

/// The inverse of PackBlock: copies contiguous memory `from` to the bytes `range` of a block of the
/// tensor `to`.
void UnpackBlock(const void* from, void* to, const Block& target, const Range& range);

}  // namespace onnxpar
