// Conversions between floats of 16 bits and float32, in blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxpar {

/// IEEE half precision.
struct Float16 {
  uint16_t bits;
};

/// The upper half of a float32.
struct Bfloat16 {
  uint16_t bits;
};

/// Converts `count` values without loss. For float16, uses the CPU's instructions, if it has them.
void Widen(const Float16* in, float* out, size_t count);
void Widen(const Bfloat16* in, float* out, size_t count);

/// Rounds `count` values to the nearest values of 16 bits, ties to even; keeps the upper bits of
/// NaNs, and makes them quiet. All CPUs give the same bits.
void Round(const float* in, Float16* out, size_t count);
void Round(const float* in, Bfloat16* out, size_t count);

}  // namespace onnxpar
