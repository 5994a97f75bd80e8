// Attention (softmax of query times keys, times values) of a few queries over keys and values whose
// rows need not be contiguous, as in a cache that is divided into pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace onnxpar {

/// How attention converts the scores of a query (its products with the keys) to weights.
struct Scores {
  float softcap;  // scores become cap * tanh(score / cap); 0: no cap
  bool has_sink;  // one more score, whose weight goes to no value
  float sink;
};

/// The positions of keys and values that a query attends to: `begin` to `end` - 1.
struct Seen {
  int64_t begin;
  int64_t end;
};

/// Computes the attention of queries that read the same keys and values, one block of positions
/// after the other: Start, Take for each block, End. A query's result has the same bits whichever
/// other queries are computed with it, and whichever further blocks it does not see.
class Attending {
 public:
  /// The largest number of positions in one Take; block i begins at position i * kBlock.
  static constexpr int64_t kBlock = 128;

  Attending(size_t queries, size_t width);

  /// Begins a computation. `query` is [queries, width], already multiplied by the scale; `scores`
  /// and `seen` have one entry for each query, and must stay valid until End.
  void Start(const float* query, const Scores* scores, const Seen* seen);

  /// Adds `count` <= kBlock positions, the first of which is `position`: keys[j] and values[j] are
  /// the addresses of the rows, of `width` floats, of position `position` + j.
  void Take(int64_t position, const float* const* keys, const float* const* values, int64_t count);

  /// Writes the result of query n, `width` floats, to results[n]: the mean of the values by their
  /// weights; zeros if the query sees no position.
  void End(float* const* results);

  /// Returns the logarithm of the sum of e^score over the positions that a query sees, and over its
  /// sink; -infinity if it has neither. With this number, results over parts of the positions can
  /// be combined.
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

/// Rotary position embedding of one row of `width` floats: rotates `half` pairs of its elements,
/// pair i by the angle with cosine[i] and sine[i]. Pair i is the elements (i, i + half), or (2i, 2i
/// + 1) if `interleaved`. Copies the elements after the first 2 * `half`. `x` and `y` may be equal.
void Rotate(const float* x, const float* cosine, const float* sine, size_t half, size_t width,
            bool interleaved, float* y);

}  // namespace onnxpar
