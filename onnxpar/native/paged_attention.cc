#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "attend.h"
#include "half.h"

namespace onnxpar {
namespace {

enum Operand : size_t {
  kQuery,
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kBlockTable,
  kRows,
  kPositions,
  kCosine,
  kSine,
  kSink,
  kHeld,
};

/// The bytes at the end of a cache row of int8 that are its scale, a float32.
constexpr size_t kScaleBytes = sizeof(float);
/// The most consecutive tokens of a text whose queries are computed together, with one pass over
/// the keys.
constexpr size_t kTogether = 8;

/// Reads `count` elements of a float32 or float16 tensor, from number `begin` on, as float32.
void Read(const Tensor& x, size_t begin, size_t count, float* out) {
  if (x.type == DataType::kFloat) {
    std::memcpy(out, static_cast<const float*>(x.data) + begin, count * sizeof(float));
  } else {
    Widen(static_cast<const Float16*>(x.data) + begin, out, count);
  }
}

/// Writes `count` float32 values as elements of a float32 or float16 tensor, from number `begin`
/// on.
void Write(const float* in, size_t count, const Tensor& x, size_t begin) {
  if (x.type == DataType::kFloat) {
    std::memcpy(static_cast<float*>(x.data) + begin, in, count * sizeof(float));
  } else {
    Round(in, static_cast<Float16*>(x.data) + begin, count);
  }
}

/// Reads as float32 the row of `count` elements that begins at element number `begin` of a cache. A
/// row of int8 is followed by its scale, a float32, by which all elements are multiplied.
void ReadRow(const Tensor& cache, size_t begin, size_t count, float* out) {
  if (cache.type != DataType::kInt8) return Read(cache, begin, count, out);
  const auto* const row = static_cast<const int8_t*>(cache.data) + begin;
  float scale;
  std::memcpy(&scale, row + count, kScaleBytes);
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(row[i]) * scale;
}

/// Writes a row of a cache; the inverse of ReadRow. For int8, the scale makes the element with the
/// largest magnitude 127 or -127. If an element is not finite, the scale is NaN, so all elements of
/// the row are NaN when they are read.
void WriteRow(const float* in, size_t count, const Tensor& cache, size_t begin) {
  if (cache.type != DataType::kInt8) return Write(in, count, cache, begin);
  auto* const row = static_cast<int8_t*>(cache.data) + begin;
  float largest = 0;
  bool finite = true;
  for (size_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::fabs(in[i]));
    finite = finite && std::isfinite(in[i]);
  }
  const float scale = finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
  for (size_t i = 0; i < count; ++i) {
    row[i] = finite && scale > 0 ? static_cast<int8_t>(std::lrint(in[i] / scale)) : 0;
  }
  std::memcpy(row + count, &scale, kScaleBytes);
}

/// Throws unless an input is float32 or float16.
void CheckType(const char* name, const Tensor& x) {
  if (x.type == DataType::kFloat || x.type == DataType::kFloat16) return;
  throw std::runtime_error(std::string(name) + " is " + TypeName(x.type) +
                           "; it must be float32 or float16");
}

void CheckShape(const char* name, const Tensor& x, const Shape& expected) {
  bool fits = x.shape.size() == expected.size();
  for (size_t i = 0; fits && i < expected.size(); ++i) {
    fits = expected[i] < 0 || expected[i] == x.shape[i];
  }
  if (fits) return;
  throw std::runtime_error(std::string(name) + " has shape " + ToText(x.shape) + ", not " +
                           ToText(expected) + " (-1: any size)");
}

/// Tokens `begin` to `begin + count` - 1, which follow each other in one text.
struct Run {
  size_t begin;
  size_t count;
};

/// Which positions of each page the caches of this process hold: all, or a fixed subset if the
/// positions of a page are divided over ranks.
class Held {
 public:
  /// Holds all positions of pages of `size` positions.
  explicit Held(int64_t size) : before_(static_cast<size_t>(size) + 1) {
    std::iota(before_.begin(), before_.end(), 0);
  }

  /// Holds the positions in the tensor `positions`, of pages of `size` positions. Throws unless
  /// they ascend and are less than `size`.
  Held(int64_t size, const Tensor& positions) : before_(static_cast<size_t>(size) + 1) {
    const auto* const named = static_cast<const int64_t*>(positions.data);
    for (int64_t i = 0, last = -1; i < positions.shape[0]; last = named[i++]) {
      if (named[i] <= last || named[i] >= size) {
        throw std::runtime_error("held has " + std::to_string(named[i]) + " behind " +
                                 std::to_string(last) + "; it must ascend and be less than " +
                                 "page_size=" + std::to_string(size));
      }
      before_[static_cast<size_t>(named[i]) + 1] = 1;
    }
    std::partial_sum(before_.begin(), before_.end(), before_.begin());
  }

  /// The number of positions of a page, and how many of them are held.
  int64_t size() const { return static_cast<int64_t>(before_.size()) - 1; }
  int64_t count() const { return before_.back(); }

  /// Returns how many positions of a text before `position` are held. This is the place of
  /// `position` among the held ones, if it is held itself: with positions 0 and 2 of pages of 4,
  /// position 6 has place 3.
  int64_t Before(int64_t position) const {
    return position / size() * count() + before_[static_cast<size_t>(position % size())];
  }

  bool Has(int64_t position) const { return Before(position + 1) > Before(position); }

 private:
  std::vector<int64_t> before_;  // for each position of a page, the held ones before it
};

/// Returns the held positions: all positions of a page if `page_size` is 0 (caches of whole pages),
/// else those in the input `held`.
Held HeldOf(const KernelContext& context, int64_t page_size, const Tensor& keys) {
  if (page_size == 0) return Held(keys.shape[2]);
  const Tensor held = context.Input(kHeld);
  CheckShape("held", held, {keys.shape[2]});
  return Held(page_size, held);
}

/// The checked inputs and outputs of one run of the node. The "place" of a position is its index
/// among the positions that this process holds (see Held::Before).
class Step {
 public:
  Step(KernelContext& context, size_t heads, size_t shared, int64_t window, bool scaled,
       int64_t page_size)
      : heads_(heads),
        shared_(shared),
        window_(window),
        query_(context.Input(kQuery)),
        key_(context.Has(kKey) ? context.Input(kKey) : query_),
        value_(context.Has(kValue) ? context.Input(kValue) : query_),
        packed_(!context.Has(kKey)),
        keys_(context.Input(kKeyCache)),
        values_(context.Input(kValueCache)) {
    CheckType("query", query_);
    const bool quantized = keys_.type == DataType::kInt8;
    if (!quantized) CheckType("key_cache", keys_);
    if (values_.type != keys_.type) throw std::runtime_error("caches differ in type");
    if (quantized != scaled) {
      throw std::runtime_error(std::string("caches are ") + TypeName(keys_.type) +
                               ", but scale_bytes is " + (scaled ? "4, that of int8" : "0"));
    }
    CheckShape("key_cache", keys_, {-1, static_cast<int64_t>(shared), -1, -1});
    CheckShape("value_cache", values_, keys_.shape);
    held_ = HeldOf(context, page_size, keys_);
    row_ = static_cast<size_t>(keys_.shape[3]);
    if (quantized && row_ <= kScaleBytes) throw std::runtime_error("rows have no elements");
    width_ = row_ - (quantized ? kScaleBytes : 0);
    const auto wide = static_cast<int64_t>(width_);
    const auto own = static_cast<int64_t>(heads) * wide,
               other = static_cast<int64_t>(shared) * wide;
    CheckShape("query", query_, {1, -1, packed_ ? own + 2 * other : own});
    const int64_t tokens = query_.shape[1];
    if (!packed_) CheckShape("key", key_, {1, tokens, other});
    if (!packed_) CheckShape("value", value_, {1, tokens, other});
    ReadPlaces(context, tokens);
    if (context.Has(kCosine)) {
      cosine_ = context.Input(kCosine);
      sine_ = context.Input(kSine);
      CheckType("cos_cache", cosine_);
      CheckShape("sin_cache", sine_, cosine_.shape);
      if (2 * HalfTurned() > width_) throw std::runtime_error("cos_cache is wider than a head");
    }
    sinks_.resize(heads);
    if (context.Has(kSink)) {
      const Tensor sink = context.Input(kSink);
      CheckType("head_sink", sink);
      CheckShape("head_sink", sink, {static_cast<int64_t>(heads)});
      Read(sink, 0, heads, sinks_.data());
    }
    CheckPositions();
    new_keys_ = keys_;
    new_values_ = values_;
    new_keys_.data = Successor(context, 1, keys_);
    new_values_.data = Successor(context, 2, values_);
  }

  size_t tokens() const { return tokens_; }
  size_t width() const { return width_; }
  /// Returns the range of places to which a token attends: those up to its own position; with a
  /// window of w, of the last w positions only.
  Seen SeenBy(size_t token) const {
    return {held_.Before(FirstSeen(token)), held_.Before(positions_[token] + 1)};
  }
  /// True if this process adds the sinks (the extra scores in the softmax) to its sums: exactly one
  /// of the processes that divide the positions does, the one that holds position 0 of pages.
  bool CountsSinks() const { return held_.Has(0); }
  const std::vector<float>& sinks() const { return sinks_; }
  DataType type() const { return query_.type; }
  Shape ResultShape() const {
    return {1, static_cast<int64_t>(tokens_), static_cast<int64_t>(heads_ * width_)};
  }

  /// Divides the tokens into runs of at most kTogether tokens that follow each other in one text.
  std::vector<Run> Runs() const {
    std::vector<Run> runs;
    for (size_t t = 0; t < tokens_; ++t) {
      const bool next = t > 0 && rows_[t] == rows_[t - 1] && positions_[t] == positions_[t - 1] + 1;
      if (next && runs.back().count < kTogether) {
        ++runs.back().count;
      } else {
        runs.push_back({t, 1});
      }
    }
    return runs;
  }

  /// Reads to `out` the query of a token and a head, with the rotary embedding applied.
  void Query(size_t token, size_t head, bool interleaved, float* out) const {
    Read(query_, (token * Stride() + head) * width_, width_, out);
    Turn(token, interleaved, out);
  }

  /// Writes a token's keys (with the rotary embedding applied) and values, for all heads, to the
  /// caches. Does nothing if this process does not hold the token's position.
  void Keep(size_t token, bool interleaved) const {
    if (!held_.Has(positions_[token])) return;
    std::vector<float> x(width_);
    for (size_t head = 0; head < shared_; ++head) {
      const size_t to = At(rows_[token], held_.Before(positions_[token]), head);
      const size_t stride = packed_ ? Stride() : shared_;
      const size_t key = packed_ ? heads_ + head : head;
      const size_t value = packed_ ? heads_ + shared_ + head : head;
      Read(key_, (token * stride + key) * width_, width_, x.data());
      Turn(token, interleaved, x.data());
      WriteRow(x.data(), width_, new_keys_, to);
      Read(value_, (token * stride + value) * width_, width_, x.data());
      WriteRow(x.data(), width_, new_values_, to);
    }
  }

  /// Sets keys[j] and values[j] to the float32 rows of place `place` + j, for one head of the
  /// token's text. Rows are in the caches, or if these have another type, converted in `scratch`.
  void Rows(size_t token, size_t head, int64_t place, int64_t count, std::vector<float>& scratch,
            const float** keys, const float** values) const {
    const size_t half = Attending::kBlock * width_;
    if (new_keys_.type != DataType::kFloat) scratch.resize(2 * half);
    for (int64_t j = 0; j < count; ++j) {
      const size_t at = At(rows_[token], place + j, head);
      keys[j] = Row(new_keys_, at, scratch.data() + j * width_);
      values[j] = Row(new_values_, at, scratch.data() + half + j * width_);
    }
  }

 private:
  void ReadPlaces(KernelContext& context, int64_t tokens) {
    const Tensor table = context.Input(kBlockTable), rows = context.Input(kRows);
    const Tensor positions = context.Input(kPositions);
    CheckShape("block_table", table, {-1, -1});
    CheckShape("rows", rows, {tokens});
    CheckShape("positions", positions, {tokens});
    tokens_ = static_cast<size_t>(tokens);
    texts_ = table.shape[0];
    pages_ = table.shape[1];
    table_ = static_cast<const int64_t*>(table.data);
    rows_ = static_cast<const int64_t*>(rows.data);
    positions_ = static_cast<const int64_t*>(positions.data);
  }

  int64_t FirstSeen(size_t token) const {
    return window_ < 0 ? 0 : std::max<int64_t>(positions_[token] + 1 - window_, 0);
  }

  void CheckPositions() const {
    const int64_t page_size = held_.size();
    for (size_t t = 0; t < tokens_; ++t) {
      const int64_t row = rows_[t], position = positions_[t];
      if (row < 0 || row >= texts_ || position < 0 || position >= pages_ * page_size) {
        throw std::runtime_error(
            "token " + std::to_string(t) + " has row " + std::to_string(row) + " and position " +
            std::to_string(position) + ", but block_table has " + std::to_string(texts_) +
            " rows and room for " + std::to_string(pages_ * page_size) + " positions in each");
      }
      if (cosine_.data != nullptr && position >= cosine_.shape[0]) {
        throw std::runtime_error("position " + std::to_string(position) +
                                 " is outside of cos_cache, which has " +
                                 std::to_string(cosine_.shape[0]) + " rows");
      }
      for (int64_t i = FirstSeen(t) / page_size; i <= position / page_size; ++i) {
        const int64_t page = table_[row * pages_ + i];
        if (page >= 0 && page < keys_.shape[0]) continue;
        throw std::runtime_error("block_table names page " + std::to_string(page) +
                                 ", but the caches have " + std::to_string(keys_.shape[0]));
      }
    }
  }

  /// Allocates an output that is the updated cache, and returns its memory, with the content of
  /// `cache`: the same memory if onnxruntime lets the output overwrite the input, else a copy.
  static void* Successor(KernelContext& context, size_t output, const Tensor& cache) {
    void* const data = context.Output(output, cache.shape);
    if (data != cache.data) std::memcpy(data, cache.data, cache.Bytes());
    return data;
  }

  const float* Row(const Tensor& cache, size_t at, float* scratch) const {
    if (cache.type == DataType::kFloat) return static_cast<const float*>(cache.data) + at;
    ReadRow(cache, at, width_, scratch);
    return scratch;
  }

  size_t Stride() const { return packed_ ? heads_ + 2 * shared_ : heads_; }
  size_t HalfTurned() const { return static_cast<size_t>(cosine_.shape[1]); }

  /// Returns the number of the first element, in a cache, of the row for a place and a head of the
  /// text in row `row` of the block table.
  size_t At(int64_t row, int64_t place, size_t head) const {
    const int64_t each = held_.count(), page = table_[row * pages_ + place / each];
    const int64_t line = (page * static_cast<int64_t>(shared_) + static_cast<int64_t>(head)) * each;
    return static_cast<size_t>(line + place % each) * row_;
  }

  void Turn(size_t token, bool interleaved, float* x) const {
    if (cosine_.data == nullptr) return;
    const size_t half = HalfTurned();
    std::vector<float> turn(2 * half);
    const size_t at = static_cast<size_t>(positions_[token]) * half;
    Read(cosine_, at, half, turn.data());
    Read(sine_, at, half, turn.data() + half);
    Rotate(x, turn.data(), turn.data() + half, half, width_, interleaved, x);
  }

  const size_t heads_, shared_;
  const int64_t window_;
  const Tensor query_, key_, value_;
  const bool packed_;
  const Tensor keys_, values_;
  Tensor new_keys_{}, new_values_{}, cosine_{}, sine_{};
  Held held_{0};
  int64_t texts_ = 0, pages_ = 0;
  size_t row_ = 0, width_ = 0, tokens_ = 0;  // row_: elements of a cache for a position
  const int64_t *table_ = nullptr, *rows_ = nullptr, *positions_ = nullptr;
  std::vector<float> sinks_;
};

/// Where a run of the node writes: to `means`, the weighted means of values; and to `log_sums`,
/// unless it is null, the logarithm of the sum of e^score for each token and head, by which the
/// results of several ranks are combined.
struct Results {
  Tensor means;
  float* log_sums;
};

class PagedAttention : public Kernel {
 public:
  /// `page_size` is the size of pages if the caches have only parts of them; 0 if they have whole
  /// pages.
  PagedAttention(const KernelInfo& info, int64_t page_size)
      : page_size_(page_size),
        heads_(Count(info, "num_heads")),
        shared_(Count(info, "kv_num_heads")),
        window_(info.Int("local_window_size", -1)),
        interleaved_(info.Int("rotary_interleaved", 0) != 0),
        smooth_(info.Int("smooth_softmax", 0) != 0),
        scaled_(info.Int("scale_bytes", 0) != 0),
        scale_(info.Float("scale", 0)),
        softcap_(info.Float("softcap", 0)) {
    if (shared_ == 0 ? heads_ == 0 : heads_ % shared_ == 0) return;
    throw std::runtime_error("num_heads=" + std::to_string(heads_) +
                             " is not a multiple of kv_num_heads=" + std::to_string(shared_));
  }

  void Compute(KernelContext& context) override {
    const Step step(context, heads_, shared_, window_, scaled_, page_size_);
    const Shape shape = step.ResultShape();
    const DataType type = page_size_ == 0 ? step.type() : DataType::kFloat;
    Results results{{type, shape, context.Output(0, shape)}, nullptr};
    if (page_size_ != 0) {
      const Shape sums{1, shape[1], static_cast<int64_t>(heads_)};
      results.log_sums = static_cast<float*>(context.Output(3, sums));
    }
    const bool has_sink = (smooth_ || context.Has(kSink)) && step.CountsSinks();
    const std::vector<Run> runs = step.Runs();
    context.ParallelFor(step.tokens(), [&](size_t token) { step.Keep(token, interleaved_); });
    if (heads_ == 0) return;
    context.ParallelFor(runs.size() * shared_, [&](size_t i) {
      Attend(step, runs[i / shared_], i % shared_, has_sink, results);
    });
  }

 private:
  /// Returns an attribute that is a number of heads. It may be 0: with more ranks than heads, some
  /// ranks have none.
  static size_t Count(const KernelInfo& info, const char* name) {
    const int64_t count = info.Int(name);
    if (count >= 0) return static_cast<size_t>(count);
    throw std::runtime_error(std::string(name) + "=" + std::to_string(count) + " is negative");
  }

  /// Computes and writes the results of a run of tokens, for the query heads that read head number
  /// `shared` of keys and values.
  void Attend(const Step& step, const Run& run, size_t shared, bool has_sink,
              const Results& results) const {
    const size_t group = heads_ / shared_, width = step.width(), queries = run.count * group;
    const float scale = scale_ != 0 ? scale_ : 1 / std::sqrt(static_cast<float>(width));
    std::vector<float> query(queries * width), means(queries * width);
    std::vector<Scores> scores;
    std::vector<Seen> seen;
    std::vector<float*> places;
    for (size_t n = 0; n < queries; ++n) {
      const size_t token = run.begin + n / group, head = shared * group + n % group;
      float* const own = query.data() + n * width;
      step.Query(token, head, interleaved_, own);
      for (size_t i = 0; i < width; ++i) own[i] *= scale;
      scores.push_back({softcap_, has_sink, step.sinks()[head]});
      seen.push_back(step.SeenBy(token));
      places.push_back(means.data() + n * width);
    }
    Attending attending(queries, width);
    attending.Start(query.data(), scores.data(), seen.data());
    std::vector<float> scratch;
    const float *keys[Attending::kBlock], *values[Attending::kBlock];
    const int64_t end = seen.back().end;
    int64_t at = seen.front().begin / Attending::kBlock * Attending::kBlock;
    for (; at < end; at += Attending::kBlock) {
      const int64_t first = std::max(at, seen.front().begin);
      const int64_t count = std::min(end, at + Attending::kBlock) - first;
      step.Rows(run.begin, shared, first, count, scratch, keys, values);
      attending.Take(first, keys, values, count);
    }
    attending.End(places.data());
    for (size_t n = 0; n < queries; ++n) {
      const size_t token = run.begin + n / group, head = shared * group + n % group;
      const size_t at = token * heads_ + head;
      Write(means.data() + n * width, width, results.means, at * width);
      if (results.log_sums != nullptr) results.log_sums[at] = attending.LogSum(n);
    }
  }

  const int64_t page_size_;
  const size_t heads_, shared_;
  const int64_t window_;
  const bool interleaved_, smooth_, scaled_;
  const float scale_, softcap_;
};

}  // namespace

std::unique_ptr<Kernel> MakePagedAttention(const KernelInfo& info) {
  return std::make_unique<PagedAttention>(info, 0);
}

std::unique_ptr<Kernel> MakePagedAttentionPart(const KernelInfo& info) {
  const int64_t page_size = info.Int("page_size");
  if (page_size > 0) return std::make_unique<PagedAttention>(info, page_size);
  throw std::runtime_error("page_size=" + std::to_string(page_size) + " is not positive");
}

}  // namespace onnxpar
