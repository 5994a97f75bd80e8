#include "block.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace onnxpar {
namespace {

/// Returns where byte number `position` of a block, counted without gaps, is in the tensor
/// (`begin`), and how many bytes of its row are left from there (`size`).
Range Locate(const Block& block, size_t position) {
  if (block.Contiguous()) return {block.offset + position, block.Bytes() - position};
  const size_t column = position % block.row_bytes;
  return {block.offset + position / block.row_bytes * block.stride + column,
          block.row_bytes - column};
}

void CopyRange(const void* from, const Block& source, size_t from_position, void* to,
               const Block& target, size_t to_position, size_t bytes) {
  while (bytes > 0) {
    const Range in = Locate(source, from_position);
    const Range out = Locate(target, to_position);
    const size_t run = std::min({in.size, out.size, bytes});
    std::memcpy(static_cast<char*>(to) + out.begin, static_cast<const char*>(from) + in.begin, run);
    from_position += run;
    to_position += run;
    bytes -= run;
  }
}

}  // namespace

Range PartOf(size_t total, size_t parts, size_t index) {
  const size_t base = total / parts;
  const size_t larger = total % parts;
  return {index * base + std::min(index, larger), base + (index < larger ? 1 : 0)};
}

void CopyBlock(const void* from, const Block& source, void* to, const Block& target) {
  assert(source.Bytes() == target.Bytes());
  CopyRange(from, source, 0, to, target, 0, source.Bytes());
}

void PackBlock(const void* from, const Block& source, const Range& range, void* to) {
  CopyRange(from, source, range.begin, to, Run(0, range.size), 0, range.size);
}

void UnpackBlock(const void* from, void* to, const Block& target, const Range& range) {
  CopyRange(from, Run(0, range.size), 0, to, target, range.begin, range.size);
}

}  // namespace onnxpar
