#include "half.h"

#include <cstring>

#include "this_cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace onnxpar {
namespace {

ONNXPAR_INLINE float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

ONNXPAR_INLINE uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

/// Branch-free code, which the compiler vectorizes.
ONNXPAR_INLINE float ToFloat(Float16 value) {
  const uint32_t shifted = (value.bits & 0x7fffu) << 13;
  const uint32_t exponent = shifted & (0x7c00u << 13);
  const uint32_t normal = shifted + ((127u - 15u) << 23);
  const uint32_t special = normal + ((128u - 16u) << 23);
  const uint32_t quiet = special | (shifted > (0x7c00u << 13) ? 0x400000u : 0u);
  const uint32_t subnormal = ToBits(FromBits(shifted + (113u << 23)) - FromBits(113u << 23));
  const uint32_t magnitude =
      exponent == (0x7c00u << 13) ? quiet : (exponent == 0 ? subnormal : normal);
  return FromBits(magnitude | (uint32_t{value.bits} & 0x8000u) << 16);
}

ONNXPAR_INLINE Float16 ToFloat16(float value) {
  const uint32_t in = ToBits(value);
  const uint32_t magnitude = in & 0x7fffffffu;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  const uint32_t special = magnitude > 0x7f800000u ? nan : 0x7c00u;
  // Adding 0.5 lines a subnormal's last bit up with float32's last bit, so the FPU rounds it.
  const uint32_t subnormal = ToBits(FromBits(magnitude) + 0.5f) - ToBits(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t rounded = magnitude >= (143u << 23)  ? special
                           : magnitude < (113u << 23) ? subnormal
                                                      : normal;
  return {static_cast<uint16_t>(rounded | ((in >> 16) & 0x8000u))};
}

ONNXPAR_INLINE Bfloat16 ToBfloat16(float value) {
  const uint32_t in = ToBits(value);
  const uint32_t rounded = (in + 0x7fffu + ((in >> 16) & 1u)) >> 16;
  const bool is_nan = (in & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? (in >> 16) | 0x40u : rounded)};
}

#if defined(__x86_64__) && defined(__GNUC__)
#define ONNXPAR_F16C __attribute__((target("avx,f16c")))

bool HasInstructions() { return CpuLevel() >= 3; }

/// The number of values that one instruction converts.
constexpr size_t kAtOnce = 8;

/// Converts the values in whole vectors of kAtOnce from the start. Returns how many it has
/// converted; the caller converts the rest.
ONNXPAR_F16C size_t WidenVectors(const Float16* in, float* out, size_t count) {
  size_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  return i;
}

ONNXPAR_F16C size_t RoundVectors(const float* in, Float16* out, size_t count) {
  size_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  return i;
}
#else
bool HasInstructions() { return false; }
size_t WidenVectors(const Float16*, float*, size_t) { return 0; }
size_t RoundVectors(const float*, Float16*, size_t) { return 0; }
#endif

// All versions of a loop give the same bits.
void WidenPlain(const Float16* in, float* out, size_t count) {
  OnThisCpu([=] {
    for (size_t i = 0; i < count; ++i) out[i] = ToFloat(in[i]);
  });
}

void RoundPlain(const float* in, Float16* out, size_t count) {
  OnThisCpu([=] {
    for (size_t i = 0; i < count; ++i) out[i] = ToFloat16(in[i]);
  });
}

void WidenPlain(const Bfloat16* in, float* out, size_t count) {
  OnThisCpu([=] {
    for (size_t i = 0; i < count; ++i) out[i] = FromBits(uint32_t{in[i].bits} << 16);
  });
}

void RoundPlain(const float* in, Bfloat16* out, size_t count) {
  OnThisCpu([=] {
    for (size_t i = 0; i < count; ++i) out[i] = ToBfloat16(in[i]);
  });
}

}  // namespace

void Widen(const Float16* in, float* out, size_t count) {
  const size_t done = HasInstructions() ? WidenVectors(in, out, count) : 0;
  if (done < count) WidenPlain(in + done, out + done, count - done);
}

void Round(const float* in, Float16* out, size_t count) {
  const size_t done = HasInstructions() ? RoundVectors(in, out, count) : 0;
  if (done < count) RoundPlain(in + done, out + done, count - done);
}

void Widen(const Bfloat16* in, float* out, size_t count) { WidenPlain(in, out, count); }

void Round(const float* in, Bfloat16* out, size_t count) { RoundPlain(in, out, count); }

}  // namespace onnxpar
