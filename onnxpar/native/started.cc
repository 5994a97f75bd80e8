#include "started.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace onnxpar {
namespace {

using Clock = std::chrono::steady_clock;

/// Memory that is kept and reused between runs, because the first use of new memory is slow.
class Pool {
 public:
  struct Memory {
    std::unique_ptr<char[]> bytes;
    size_t size = 0;
  };

  /// Returns memory of at least `size` bytes, kept or new; kept memory has less than twice as many.
  /// Sizes are rounded up to few different ones, so that sizes that depend on data do not each
  /// leave memory that fits no other.
  Memory Take(size_t size) {
    const size_t step = StepOf(size);
    size = (size + step - 1) / step * step;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = kept_.lower_bound(size);
      if (found != kept_.end() && found->first / 2 <= size) {
        Memory memory{std::move(found->second), found->first};
        kept_.erase(found);
        return memory;
      }
    }
    try {
      return {std::unique_ptr<char[]>(new char[size]), size};
    } catch (const std::bad_alloc&) {
      throw std::runtime_error("there is no memory for a copy of " + std::to_string(size) +
                               " bytes");
    }
  }

  void GiveBack(Memory memory) {
    if (!memory.bytes) return;
    std::lock_guard<std::mutex> lock(mutex_);
    kept_.emplace(memory.size, std::move(memory.bytes));
  }

 private:
  /// Returns the unit to which a size is rounded up: a quarter of the largest power of two up to
  /// `size`.
  static size_t StepOf(size_t size) {
    size_t step = kLeast;
    while (step < size / 8 + 1) step *= 2;
    return step;
  }

  static constexpr size_t kLeast = 64;

  std::mutex mutex_;
  std::multimap<size_t, std::unique_ptr<char[]>> kept_;
};

Pool& Buffers() {
  static auto* pool = new Pool;  // outlives all threads
  return *pool;
}

int64_t MicrosecondsSince(Clock::time_point then, Clock::time_point now) {
  return std::chrono::duration_cast<std::chrono::microseconds>(now - then).count();
}

/// Copies of all inputs of a node, in one piece of memory of the pool.
class Operands {
 public:
  explicit Operands(const KernelContext& node) {
    size_t size = 0;
    for (size_t i = 0; i < node.InputCount(); ++i) {
      tensors_.emplace_back();
      if (!node.Has(i)) continue;
      tensors_[i] = node.Input(i);
      size += Aligned(tensors_[i]->Bytes());
    }
    memory_ = Buffers().Take(size);
    char* next = memory_.bytes.get();
    for (auto& tensor : tensors_) {
      if (!tensor) continue;
      if (tensor->Bytes() > 0) std::memcpy(next, tensor->data, tensor->Bytes());
      tensor->data = next;
      next += Aligned(tensor->Bytes());
    }
  }
  ~Operands() { Buffers().GiveBack(std::move(memory_)); }

  bool Has(size_t index) const { return index < Count() && tensors_[index].has_value(); }
  const Tensor& operator[](size_t index) const { return tensors_.at(index).value(); }
  size_t Count() const { return tensors_.size(); }

 private:
  static size_t Aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

  Pool::Memory memory_;
  std::vector<std::optional<Tensor>> tensors_;
};

/// A collective that was started. Its kernel sees this as the node, with inputs and outputs in
/// memory of the plugin.
class Started : public KernelContext {
 public:
  Started(std::shared_ptr<Collective> collective, const KernelContext& node, bool in_place)
      : collective_(std::move(collective)), operands_(node), in_place_(in_place) {}
  ~Started() override { Buffers().GiveBack(std::move(result_)); }

  /// Runs the collective, on the plugin's thread; keeps its exception for Await.
  void Run() {
    std::exception_ptr error;
    began_ = Clock::now();
    try {
      collective_->Compute(*this);
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = error;
    ended_ = Clock::now();
    done_ = true;
    changed_.notify_all();
  }

  /// Waits until the collective has ended. Returns its result, or throws its exception.
  Tensor Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    if (error_) std::rethrow_exception(error_);
    return y_;
  }

  /// Returns the shape of Complete's token; see MakeComplete.
  Shape Token() const {
    const Clock::time_point now = Clock::now();
    Shape token{0, MicrosecondsSince(began_, now), MicrosecondsSince(ended_, now)};
    token.insert(token.end(), own_token_.begin() + 1, own_token_.end());
    return token;
  }

  size_t InputCount() const override { return operands_.Count(); }
  Tensor Input(size_t index) const override { return operands_[index]; }
  bool Has(size_t index) const override { return operands_.Has(index); }
  size_t OutputCount() const override { return 2; }
  void* Output(size_t index, const Shape& shape) override {
    if (index > 0) {
      own_token_ = shape;
      return nullptr;  // it is empty
    }
    y_ = {operands_[0].type, shape, operands_[0].data};
    if (in_place_) return y_.data;
    result_ = Buffers().Take(y_.Bytes());
    y_.data = result_.bytes.get();
    return y_.data;
  }

 private:
  const std::shared_ptr<Collective> collective_;
  const Operands operands_;
  const bool in_place_;
  Pool::Memory result_;
  Tensor y_{};
  Shape own_token_;
  Clock::time_point began_, ended_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  bool done_ = false;
};

/// The collectives of this process that were started and not completed, by number.
class Numbered {
 public:
  int64_t Add(std::shared_ptr<Started> started) {
    std::lock_guard<std::mutex> lock(mutex_);
    started_[++last_] = std::move(started);
    return last_;
  }

  /// Removes the collective with this number, and returns it; null if there is none.
  std::shared_ptr<Started> Take(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = started_.find(number);
    if (found == started_.end()) return nullptr;
    std::shared_ptr<Started> started = std::move(found->second);
    started_.erase(found);
    return started;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Started>> started_;
  int64_t last_ = 0;
};

Numbered& AllStarted() {
  static auto* all = new Numbered;  // outlives all threads
  return *all;
}

class Start : public Kernel {
 public:
  Start(std::unique_ptr<Collective> collective, bool in_place, std::shared_ptr<World> world)
      : collective_(std::move(collective)), in_place_(in_place), world_(std::move(world)) {}
  ~Start() override { AllStarted().Take(last_); }

  /// Forgets the collective that this node started in an earlier run, if that run failed before the
  /// collective was completed.
  void Compute(KernelContext& context) override {
    AllStarted().Take(last_);
    Shape result = context.Input(0).shape;
    try {
      result = collective_->ResultShape(context);
    } catch (const std::exception&) {  // the collective refuses X, and tells all ranks why
    }
    auto started = std::make_shared<Started>(collective_, context, in_place_);
    world_->InBackground(collective_->group(), [started] { started->Run(); });
    last_ = AllStarted().Add(std::move(started));
    Shape pending{0, last_};
    pending.insert(pending.end(), result.begin(), result.end());
    context.Output(0, pending);
    context.Output(1, {0});
  }

 private:
  const std::shared_ptr<Collective> collective_;
  const bool in_place_;
  const std::shared_ptr<World> world_;
  int64_t last_ = 0;
};

class Complete : public Kernel {
 public:
  void Compute(KernelContext& context) override {
    const Tensor pending = context.Input(0);
    const auto started = pending.shape.size() < 2 ? nullptr : AllStarted().Take(pending.shape[1]);
    if (!started) {
      throw std::runtime_error("Complete: its operand of shape " + ToText(pending.shape) +
                               " names no started collective; feed it from a Start");
    }
    const Tensor result = started->Await();
    void* const y = context.Output(0, result.shape);
    if (result.Bytes() > 0) std::memcpy(y, result.data, result.Bytes());
    context.Output(1, started->Token());
  }
};

class After : public Kernel {
 public:
  void Compute(KernelContext& context) override { context.Output(0, {0}); }
};

}  // namespace

std::unique_ptr<Kernel> MakeStart(std::unique_ptr<Collective> collective, bool in_place,
                                  std::shared_ptr<World> world) {
  return std::make_unique<Start>(std::move(collective), in_place, std::move(world));
}

std::unique_ptr<Kernel> MakeComplete() { return std::make_unique<Complete>(); }

std::unique_ptr<Kernel> MakeAfter() { return std::make_unique<After>(); }

}  // namespace onnxpar
