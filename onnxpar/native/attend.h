// Attention of one query over keys and values that lie in pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace onnxpar {

/// How attention converts scores to weights.
struct Scores {
  float softcap;  // scores become cap * tanh(score / cap); 0: no cap
  bool has_sink;  // one more score, whose weight goes to no value
  float sink;
};

/// The positions that a query sees, `begin` to `end` - 1.
struct Seen {
  int64_t begin;
  int64_t end;
};

/// Attention of queries that read the same keys and values, block by block. A query's result does
/// not depend on the others, nor on the blocks that it does not see.
class Attending {
 public:
  /// The number of positions of a block; block i begins at position i * kBlock.
  static constexpr int64_t kBlock = 128;

  Attending(size_t queries, size_t width);

  /// Begins: `query` has the elements of each query, times the scale.
  void Start(const float* query, const Scores* scores, const Seen* seen);

  /// Processes a block of keys and values that begins at `position`: rows of `width` elements;
  /// `rows` has the address of each position's row.
  void Take(int64_t position, const float* const* keys, const float* const* values, int64_t count);

  /// Writes the result of each query: zeros if the query has seen no position.
  void End(float* const* results);

  /// The logarithm of the sum of e^score over the positions that a query has seen; -infinity if it
  /// has seen none.
  float LogSum(size_t query) const;

 private:
  void Weigh(size_t query, int64_t position, int64_t count);

  const size_t queries_, width_;
  const float* query_ = nullptr;
  const Scores* scores_ = nullptr;
  const Seen* seen_ = nullptr;
  std::vector<float> weights_;  // queries, kBlock
  std::vector<float> sums_;     // queries, width: of values times weights
  std::vector<float> largest_;  // the largest score of each query so far
  std::vector<float> totals_;   // the sum of its weights
};

/// Rotates pairs of the first 2 * `half` of `width` elements: (i, i + half), or (2i, 2i + 1) if
/// `interleaved`. `x` and `y` may be the same.
void Rotate(const float* x, const float* cosine, const float* sine, size_t half, size_t width,
            bool interleaved, float* y);

}  // namespace onnxpar
