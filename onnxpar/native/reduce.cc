#include "reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "ort.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ONNXPAR_FOR_EACH_CPU \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define ONNXPAR_FOR_EACH_CPU
#endif

namespace onnxpar {
namespace {

/// The number of elements that are reduced at a time, so that the accumulator stays in the
/// first-level cache.
constexpr size_t kBlock = 1024;

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct Bfloat16 {
  uint16_t bits;

  float Load() const { return FromBits(uint32_t{bits} << 16); }

  static Bfloat16 Round(float value) {
    const uint32_t in = ToBits(value);
    const uint32_t rounded = (in + 0x7fffu + ((in >> 16) & 1u)) >> 16;
    const bool is_nan = (in & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<uint16_t>(is_nan ? (in >> 16) | 0x40u : rounded)};
  }
};

/// IEEE half precision, converted by branch-free integer code, which the compiler vectorizes for
/// any CPU.
struct Float16 {
  uint16_t bits;

  float Load() const {
    const uint32_t shifted = (bits & 0x7fffu) << 13;
    const uint32_t exponent = shifted & (0x7c00u << 13);
    const uint32_t normal = shifted + ((127u - 15u) << 23);
    const uint32_t special = normal + ((128u - 16u) << 23);
    const uint32_t subnormal = ToBits(FromBits(shifted + (113u << 23)) - FromBits(113u << 23));
    const uint32_t magnitude =
        exponent == (0x7c00u << 13) ? special : (exponent == 0 ? subnormal : normal);
    return FromBits(magnitude | (uint32_t{bits} & 0x8000u) << 16);
  }

  static Float16 Round(float value) {
    const uint32_t in = ToBits(value);
    const uint32_t magnitude = in & 0x7fffffffu;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    // Adding 0.5 lines a subnormal's last bit up with float32's last bit, so the FPU rounds it.
    const uint32_t subnormal = ToBits(FromBits(magnitude) + 0.5f) - ToBits(0.5f);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t rounded = magnitude >= (143u << 23)  ? special
                             : magnitude < (113u << 23) ? subnormal
                                                        : normal;
    return {static_cast<uint16_t>(rounded | ((in >> 16) & 0x8000u))};
  }
};

/// The type in which elements of type T are accumulated, and conversions to and from it.
template <typename T>
struct Element {
  using Accumulator = T;
  static T Load(T value) { return value; }
  static T Round(T value) { return value; }
};
template <>
struct Element<Float16> {
  using Accumulator = float;
  static float Load(Float16 value) { return value.Load(); }
  static Float16 Round(float value) { return Float16::Round(value); }
};
template <>
struct Element<Bfloat16> {
  using Accumulator = float;
  static float Load(Bfloat16 value) { return value.Load(); }
  static Bfloat16 Round(float value) { return Bfloat16::Round(value); }
};

/// The type in which T is added and multiplied: unsigned for integers, because signed overflow is
/// undefined.
template <typename T>
using Wrapping = std::conditional_t<std::is_integral_v<T>, uint64_t, T>;

struct Sum {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};
struct Mean : Sum {};
struct Prod {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  }
};
struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    return a > b || a != a ? a : b;  // a NaN in b fails the comparison and is taken
  }
};
struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

template <typename T, typename Operation>
void FoldBlocks(const void* const* sources, size_t source_count, void* out, size_t elements) {
  using Accumulator = typename Element<T>::Accumulator;
  const Operation operation;
  Accumulator accumulator[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = std::min(kBlock, elements - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (size_t i = 0; i < count; ++i) accumulator[i] = Element<T>::Load(first[i]);
    for (size_t s = 1; s < source_count; ++s) {
      const T* source = static_cast<const T*>(sources[s]) + begin;
      for (size_t i = 0; i < count; ++i) {
        accumulator[i] = operation(accumulator[i], Element<T>::Load(source[i]));
      }
    }
    if constexpr (std::is_same_v<Operation, Mean>) {
      for (size_t i = 0; i < count; ++i) accumulator[i] /= static_cast<Accumulator>(source_count);
    }
    T* result = static_cast<T*>(out) + begin;
    for (size_t i = 0; i < count; ++i) result[i] = Element<T>::Round(accumulator[i]);
  }
}

/// Compiled once for each level of x86-64, with what it calls; the loader takes the version for
/// this CPU. All give the same bits.
template <typename T>
ONNXPAR_FOR_EACH_CPU void FoldType(ReduceOp op, const void* const* sources, size_t source_count,
                                   void* out, size_t elements) {
  switch (op) {
    case ReduceOp::kSum:
      return FoldBlocks<T, Sum>(sources, source_count, out, elements);
    case ReduceOp::kMax:
      return FoldBlocks<T, Max>(sources, source_count, out, elements);
    case ReduceOp::kMin:
      return FoldBlocks<T, Min>(sources, source_count, out, elements);
    case ReduceOp::kProd:
      return FoldBlocks<T, Prod>(sources, source_count, out, elements);
    case ReduceOp::kMean:
      return FoldBlocks<T, Mean>(sources, source_count, out, elements);
  }
}

}  // namespace

ReduceOp ParseReduceOp(const std::string& name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "max") return ReduceOp::kMax;
  if (name == "min") return ReduceOp::kMin;
  if (name == "prod") return ReduceOp::kProd;
  throw std::runtime_error("op='" + name + "' is not a reduction; use sum, max, min or prod");
}

void Fold(const Reduction& reduction, const void* const* sources, size_t source_count, void* out,
          size_t elements) {
  switch (reduction.type) {
    case DataType::kFloat:
      return FoldType<float>(reduction.op, sources, source_count, out, elements);
    case DataType::kDouble:
      return FoldType<double>(reduction.op, sources, source_count, out, elements);
    case DataType::kFloat16:
      return FoldType<Float16>(reduction.op, sources, source_count, out, elements);
    case DataType::kBfloat16:
      return FoldType<Bfloat16>(reduction.op, sources, source_count, out, elements);
    case DataType::kInt8:
      return FoldType<int8_t>(reduction.op, sources, source_count, out, elements);
    case DataType::kUint8:
      return FoldType<uint8_t>(reduction.op, sources, source_count, out, elements);
    case DataType::kInt16:
      return FoldType<int16_t>(reduction.op, sources, source_count, out, elements);
    case DataType::kUint16:
      return FoldType<uint16_t>(reduction.op, sources, source_count, out, elements);
    case DataType::kInt32:
      return FoldType<int32_t>(reduction.op, sources, source_count, out, elements);
    case DataType::kUint32:
      return FoldType<uint32_t>(reduction.op, sources, source_count, out, elements);
    case DataType::kInt64:
      return FoldType<int64_t>(reduction.op, sources, source_count, out, elements);
    case DataType::kUint64:
      return FoldType<uint64_t>(reduction.op, sources, source_count, out, elements);
    case DataType::kBool: {
      const bool any = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kMax;
      return FoldType<uint8_t>(any ? ReduceOp::kMax : ReduceOp::kMin, sources, source_count, out,
                               elements);
    }
    default:
      throw std::runtime_error(std::string("cannot reduce elements of type ") +
                               TypeName(reduction.type));
  }
}

}  // namespace onnxpar
