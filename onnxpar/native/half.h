// Conversions of arrays between float32 and the floats of 16 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxpar {

/// A value of IEEE half precision, as bits.
struct Float16 {
  uint16_t bits;
};

/// A bfloat16 value: the upper 16 bits of a float32.
struct Bfloat16 {
  uint16_t bits;
};

/// Converts `count` values to float32, which is exact. For float16, uses the CPU's instructions
/// (F16C) if it has them.
void Widen(const Float16* in, float* out, size_t count);
void Widen(const Bfloat16* in, float* out, size_t count);

/// Rounds `count` values to the nearest values of 16 bits, ties to even. A NaN keeps its upper bits
/// and becomes quiet. All CPUs give the same bits.
void Round(const float* in, Float16* out, size_t count);
void Round(const float* in, Bfloat16* out, size_t count);

}  // namespace onnxpar
