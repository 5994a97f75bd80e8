#include "block.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace onnxpar {

void CopyBlock(const void* from, const Block& source, void* to, const Block& target) {
  const size_t total = source.Bytes();
  assert(total == target.Bytes());
  if (total == 0) return;
  const size_t from_run = source.Contiguous() ? total : source.row_bytes;
  const size_t to_run = target.Contiguous() ? total : target.row_bytes;
  const char* const from_base = static_cast<const char*>(from) + source.offset;
  char* const to_base = static_cast<char*>(to) + target.offset;
  for (size_t done = 0; done < total;) {
    const size_t from_column = done % from_run;
    const size_t to_column = done % to_run;
    const size_t bytes = std::min(from_run - from_column, to_run - to_column);
    std::memcpy(to_base + done / to_run * target.stride + to_column,
                from_base + done / from_run * source.stride + from_column, bytes);
    done += bytes;
  }
}

Range PartOf(size_t total, size_t parts, size_t index) {
  const size_t base = total / parts;
  const size_t larger = total % parts;
  return {index * base + std::min(index, larger), base + (index < larger ? 1 : 0)};
}

}  // namespace onnxpar
