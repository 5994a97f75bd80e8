#include "reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "half.h"
#include "ort.h"
#include "this_cpu.h"

namespace onnxpar {
namespace {

/// The number of elements that are reduced over all sources before the next elements, so that the
/// accumulator stays in the first-level cache.
constexpr size_t kBlock = 1024;

/// The type in which elements of type T are accumulated: float32 for floats of 16 bits, else T.
template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>, float, T>;

/// Returns the address of `count` elements as accumulators: `in` itself if T is the accumulator's
/// type, else `buffer`, to which it converts them.
template <typename T>
const Accumulator<T>* Load(const T* in, Accumulator<T>* buffer, size_t count) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    return in;
  } else {
    Widen(in, buffer, count);
    return buffer;
  }
}

template <typename T>
void Store(const Accumulator<T>* in, T* out, size_t count) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    if (in != out) std::memcpy(out, in, count * sizeof(T));
  } else {
    Round(in, out, count);
  }
}

/// The type in which T is added and multiplied: unsigned for integers, because the overflow of
/// signed integers is undefined in C++.
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
ONNXPAR_INLINE void FoldBlocks(double divisor, const void* const* sources, size_t source_count,
                               void* out, size_t elements) {
  const Operation operation;
  Accumulator<T> sum[kBlock], buffer[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = std::min(kBlock, elements - begin);
    const auto load = [&](size_t source, Accumulator<T>* into) {
      return Load(static_cast<const T*>(sources[source]) + begin, into, count);
    };
    const Accumulator<T>* left = load(0, sum);
    for (size_t s = 1; s < source_count; ++s) {
      const Accumulator<T>* right = load(s, buffer);
      for (size_t i = 0; i < count; ++i) sum[i] = operation(left[i], right[i]);
      left = sum;
    }
    if constexpr (std::is_same_v<Operation, Mean>) {
      for (size_t i = 0; i < count; ++i) sum[i] = left[i] / static_cast<Accumulator<T>>(divisor);
      left = sum;
    }
    Store(left, static_cast<T*>(out) + begin, count);
  }
}

template <typename T>
ONNXPAR_INLINE void FoldWith(const Reduction& reduction, const void* const* sources,
                             size_t source_count, void* out, size_t elements) {
  const double divisor = reduction.divisor;
  switch (reduction.op) {
    case ReduceOp::kSum:
      return FoldBlocks<T, Sum>(divisor, sources, source_count, out, elements);
    case ReduceOp::kMax:
      return FoldBlocks<T, Max>(divisor, sources, source_count, out, elements);
    case ReduceOp::kMin:
      return FoldBlocks<T, Min>(divisor, sources, source_count, out, elements);
    case ReduceOp::kProd:
      return FoldBlocks<T, Prod>(divisor, sources, source_count, out, elements);
    case ReduceOp::kMean:
      return FoldBlocks<T, Mean>(divisor, sources, source_count, out, elements);
  }
}

/// All versions give the same bits.
template <typename T>
void FoldType(const Reduction& reduction, const void* const* sources, size_t source_count,
              void* out, size_t elements) {
  OnThisCpu([&] { FoldWith<T>(reduction, sources, source_count, out, elements); });
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
      return FoldType<float>(reduction, sources, source_count, out, elements);
    case DataType::kDouble:
      return FoldType<double>(reduction, sources, source_count, out, elements);
    case DataType::kFloat16:
      return FoldType<Float16>(reduction, sources, source_count, out, elements);
    case DataType::kBfloat16:
      return FoldType<Bfloat16>(reduction, sources, source_count, out, elements);
    case DataType::kInt8:
      return FoldType<int8_t>(reduction, sources, source_count, out, elements);
    case DataType::kUint8:
      return FoldType<uint8_t>(reduction, sources, source_count, out, elements);
    case DataType::kInt16:
      return FoldType<int16_t>(reduction, sources, source_count, out, elements);
    case DataType::kUint16:
      return FoldType<uint16_t>(reduction, sources, source_count, out, elements);
    case DataType::kInt32:
      return FoldType<int32_t>(reduction, sources, source_count, out, elements);
    case DataType::kUint32:
      return FoldType<uint32_t>(reduction, sources, source_count, out, elements);
    case DataType::kInt64:
      return FoldType<int64_t>(reduction, sources, source_count, out, elements);
    case DataType::kUint64:
      return FoldType<uint64_t>(reduction, sources, source_count, out, elements);
    case DataType::kBool: {
      const bool any = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kMax;
      const Reduction logical{reduction.type, any ? ReduceOp::kMax : ReduceOp::kMin};
      return FoldType<uint8_t>(logical, sources, source_count, out, elements);
    }
    default:
      throw std::runtime_error(std::string("cannot reduce elements of type ") +
                               TypeName(reduction.type));
  }
}

}  // namespace onnxpar
