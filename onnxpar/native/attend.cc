#include "attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "this_cpu.h"

namespace onnxpar {
namespace {

constexpr size_t kLanes = 8;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t WholeLanes __attribute__((vector_size(kLanes * sizeof(int32_t))));

/// How many rows ahead keys are prefetched. The processor's own prefetching stops at the end of a
/// memory page.
constexpr int64_t kAhead = 12;
constexpr size_t kCacheLine = 64;

ONNXPAR_INLINE void Fetch(const float* row, size_t width) {
  for (size_t i = 0; i < width; i += kCacheLine / sizeof(float)) __builtin_prefetch(row + i);
}

ONNXPAR_INLINE void Load(const float* from, Lanes& to) { std::memcpy(&to, from, sizeof(Lanes)); }
ONNXPAR_INLINE void Store(const Lanes& from, float* to) { std::memcpy(to, &from, sizeof(Lanes)); }

ONNXPAR_INLINE float SumOf(const Lanes& x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/// Replaces each lane x <= 0 by e^x, exact to 2 units in the last place; each x < -87 by e^-87.
ONNXPAR_INLINE void Power(Lanes& x) {
  x = x < -87.0f ? Lanes{} - 87.0f : x;
  constexpr float kRound = 12582912.0f;  // adding it rounds to an integer
  const Lanes n = (x * 1.44269504f + kRound) - kRound;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const WholeLanes bits = (__builtin_convertvector(n, WholeLanes) + 127) << 23;
  Lanes scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  x = p * scale;
}

/// Writes scores[n * stride + j] = the dot product of query n and key j, for `N` queries and
/// `count` keys of `width` floats. If `values` is not null, prefetches the rows of values, which
/// are read next, and of later keys.
template <size_t N>
ONNXPAR_INLINE void Products(const float* query, size_t width, const float* const* keys,
                             const float* const* values, int64_t count, float* scores,
                             size_t stride) {
  const size_t whole = width / kLanes * kLanes;
  for (int64_t j = 0; j < count; ++j) {
    const float* const key = keys[j];
    if (values != nullptr) {
      Fetch(keys[std::min(j + kAhead, count - 1)], width);
      Fetch(values[j], width);
    }
    Lanes sums[N];
#pragma GCC unroll 4
    for (size_t n = 0; n < N; ++n) sums[n] = Lanes{};
    for (size_t i = 0; i < whole; i += kLanes) {
      Lanes k, q;
      Load(key + i, k);
#pragma GCC unroll 4
      for (size_t n = 0; n < N; ++n) {
        Load(query + n * width + i, q);
        sums[n] += q * k;
      }
    }
    float own[N];
#pragma GCC unroll 4
    for (size_t n = 0; n < N; ++n) own[n] = SumOf(sums[n]);
    for (size_t n = 0; n < N; ++n) {
      for (size_t i = whole; i < width; ++i) own[n] += query[n * width + i] * key[i];
      scores[n * stride + j] = own[n];
    }
  }
}

ONNXPAR_INLINE void AllProducts(const float* query, size_t queries, size_t width,
                                const float* const* keys, const float* const* values, int64_t count,
                                float* scores, size_t stride) {
  size_t n = 0;
  for (; n + 4 <= queries; n += 4) {
    Products<4>(query + n * width, width, keys, values, count, scores + n * stride, stride);
    values = nullptr;
  }
  for (; n < queries; ++n) {
    Products<1>(query + n * width, width, keys, values, count, scores + n * stride, stride);
    values = nullptr;
  }
}

/// Adds weights[n * stride + j] * values[j] to sums[n], a row of `width` floats, for `N` queries
/// and `count` values. Processes two vectors of elements at a time.
template <size_t N>
ONNXPAR_INLINE void Means(const float* weights, size_t stride, const float* const* values,
                          int64_t count, float* sums, size_t width) {
  size_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    Lanes a[N], b[N];
    for (size_t n = 0; n < N; ++n) {
      Load(sums + n * width + i, a[n]);
      Load(sums + n * width + i + kLanes, b[n]);
    }
    for (int64_t j = 0; j < count; ++j) {
      Lanes v, w;
      Load(values[j] + i, v);
      Load(values[j] + i + kLanes, w);
      for (size_t n = 0; n < N; ++n) {
        a[n] += weights[n * stride + j] * v;
        b[n] += weights[n * stride + j] * w;
      }
    }
    for (size_t n = 0; n < N; ++n) {
      Store(a[n], sums + n * width + i);
      Store(b[n], sums + n * width + i + kLanes);
    }
  }
  for (; i < width; ++i) {
    for (size_t n = 0; n < N; ++n) {
      float sum = sums[n * width + i];
      for (int64_t j = 0; j < count; ++j) sum += weights[n * stride + j] * values[j][i];
      sums[n * width + i] = sum;
    }
  }
}

ONNXPAR_INLINE void AllMeans(const float* weights, size_t stride, const float* const* values,
                             int64_t count, float* sums, size_t queries, size_t width) {
  size_t n = 0;
  for (; n + 4 <= queries; n += 4) {
    Means<4>(weights + n * stride, stride, values, count, sums + n * width, width);
  }
  for (; n < queries; ++n) {
    Means<1>(weights + n * stride, stride, values, count, sums + n * width, width);
  }
}

/// Replaces each score by e^(score - largest).
ONNXPAR_INLINE void Powers(float* scores, int64_t count, float largest) {
  constexpr auto kStep = static_cast<int64_t>(kLanes);
  int64_t j = 0;
  Lanes x;
  for (; j + kStep <= count; j += kStep) {
    Load(scores + j, x);
    x -= largest;
    Power(x);
    Store(x, scores + j);
  }
  if (j == count) return;
  x = Lanes{} + largest;  // lanes beyond the scores become e^0
  const size_t rest = static_cast<size_t>(count - j) * sizeof(float);
  std::memcpy(&x, scores + j, rest);
  x -= largest;
  Power(x);
  std::memcpy(scores + j, &x, rest);
}

/// Returns the sum of `count` floats. The order of additions depends on `count` only, so the bits
/// of the sum are the same on every CPU.
ONNXPAR_INLINE float Total(const float* x, int64_t count) {
  const int64_t whole = count / static_cast<int64_t>(kLanes) * static_cast<int64_t>(kLanes);
  Lanes sums = {};
  for (int64_t j = 0; j < whole; j += kLanes) {
    Lanes v;
    Load(x + j, v);
    sums += v;
  }
  float sum = SumOf(sums);
  for (int64_t j = whole; j < count; ++j) sum += x[j];
  return sum;
}

}  // namespace

Attending::Attending(size_t queries, size_t width)
    : queries_(queries),
      width_(width),
      weights_(queries * kBlock),
      sums_(queries * width),
      largest_(queries),
      totals_(queries) {}

void Attending::Start(const float* query, const Scores* scores, const Seen* seen) {
  query_ = query;
  scores_ = scores;
  seen_ = seen;
  std::fill(sums_.begin(), sums_.end(), 0.0f);
  for (size_t n = 0; n < queries_; ++n) {
    const Scores& own = scores[n];
    largest_[n] = own.has_sink ? own.sink : -std::numeric_limits<float>::infinity();
    totals_[n] = own.has_sink ? 1.0f : 0.0f;
  }
}

void Attending::Take(int64_t position, const float* const* keys, const float* const* values,
                     int64_t count) {
  OnThisCpu(
      [&] { AllProducts(query_, queries_, width_, keys, values, count, weights_.data(), kBlock); });
  for (size_t n = 0; n < queries_; ++n) Weigh(n, position, count);
  OnThisCpu(
      [&] { AllMeans(weights_.data(), kBlock, values, count, sums_.data(), queries_, width_); });
}

/// Replaces the scores of one query for this block by weights e^(score - the largest score so far),
/// or 0 for positions that the query does not see. If the largest score has grown, scales the
/// query's earlier sums down to it.
void Attending::Weigh(size_t query, int64_t position, int64_t count) {
  float* const weights = weights_.data() + query * kBlock;
  const int64_t begin = std::clamp<int64_t>(seen_[query].begin - position, 0, count);
  const int64_t end = std::clamp<int64_t>(seen_[query].end - position, begin, count);
  std::fill(weights, weights + begin, 0.0f);
  std::fill(weights + end, weights + count, 0.0f);
  if (begin == end) return;
  const float cap = scores_[query].softcap;
  if (cap > 0) {
    for (int64_t j = begin; j < end; ++j) weights[j] = cap * std::tanh(weights[j] / cap);
  }
  const float before = largest_[query];
  const float largest = std::max(before, *std::max_element(weights + begin, weights + end));
  OnThisCpu([&] { Powers(weights + begin, end - begin, largest); });
  largest_[query] = largest;
  const float shrink = largest > before ? std::exp(before - largest) : 1.0f;
  totals_[query] =
      totals_[query] * shrink + OnThisCpu([&] { return Total(weights + begin, end - begin); });
  if (shrink == 1.0f) return;
  float* const sums = sums_.data() + query * width_;
  for (size_t i = 0; i < width_; ++i) sums[i] *= shrink;
}

void Attending::End(float* const* results) {
  for (size_t n = 0; n < queries_; ++n) {
    const float* const sums = sums_.data() + n * width_;
    const float total = totals_[n] == 0 ? 1.0f : totals_[n];
    for (size_t i = 0; i < width_; ++i) results[n][i] = sums[i] / total;
  }
}

float Attending::LogSum(size_t query) const { return largest_[query] + std::log(totals_[query]); }

void Rotate(const float* x, const float* cosine, const float* sine, size_t half, size_t width,
            bool interleaved, float* y) {
  const size_t step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
  for (size_t i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + other];
    y[i * step] = a * cosine[i] - b * sine[i];
    y[i * step + other] = b * cosine[i] + a * sine[i];
  }
  if (x != y) std::copy(x + 2 * half, x + width, y + 2 * half);
}

}  // namespace onnxpar
