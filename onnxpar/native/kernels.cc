#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "axis.h"
#include "collective.h"

namespace onnxpar {
namespace {

using Sizes = std::vector<int64_t>;

/// Checks that `sizes` gives one size for each member of the group.
void CheckSizes(const char* name, const Sizes& sizes, const Group& group) {
  const bool negative = std::any_of(sizes.begin(), sizes.end(), [](int64_t s) { return s < 0; });
  if (sizes.size() == group.ranks.size() && !negative) return;
  throw std::runtime_error(std::string(name) + "=" + ToText(sizes) +
                           " must give a size >= 0 for each of the " +
                           std::to_string(group.ranks.size()) + " ranks of group " +
                           ToText(group.ranks));
}

/// Checks what a size attribute says about X.
void CheckExtent(const std::string& attribute, int64_t expected, const Shape& shape, size_t axis) {
  if (shape[axis] == expected) return;
  throw std::runtime_error("X has shape " + ToText(shape) + ", that is " +
                           std::to_string(shape[axis]) + " along axis " + std::to_string(axis) +
                           ", but " + attribute + " calls for " + std::to_string(expected));
}

class AllReduce : public Collective {
 public:
  AllReduce(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("AllReduce", info, std::move(world)),
        op_(ParseReduceOp(AgreeString(info, "op", "sum"))) {}

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    void* const y = context.Output(0, x.shape);
    if (Alone(x, y)) return;
    Run(x, x.shape, [&](Transport& transport, const Call& call) {
      transport.AllReduce(call, {x.type, op_}, x.data, y, x.Elements());
    });
  }

  const ReduceOp op_;
};

class AllGather : public Collective {
 public:
  AllGather(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("AllGather", info, std::move(world)),
        axis_(AgreeInt(info, "axis")),
        sizes_(AgreeInts(info, "sizes")) {
    CheckSizes("sizes", sizes_, group_);
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t axis = NormalizeAxis(axis_, x.shape);
    CheckExtent("sizes=" + ToText(sizes_), sizes_[group_.me], x.shape, axis);
    const Shape y_shape = WithExtent(x.shape, axis, SumOf(sizes_));
    void* const y = context.Output(0, y_shape);
    if (Alone(x, y)) return;
    Run(x, WithoutAxis(x.shape, axis), [&](Transport& transport, const Call& call) {
      transport.AllGather(call, x.data, y, SlicesOf(y_shape, axis, ElementSize(x.type), sizes_));
    });
  }

  const int64_t axis_;
  const Sizes sizes_;
};

class ReduceScatter : public Collective {
 public:
  ReduceScatter(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("ReduceScatter", info, std::move(world)),
        axis_(AgreeInt(info, "axis")),
        sizes_(AgreeInts(info, "sizes")),
        op_(ParseReduceOp(AgreeString(info, "op", "sum"))) {
    CheckSizes("sizes", sizes_, group_);
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t axis = NormalizeAxis(axis_, x.shape);
    CheckExtent("the sum of sizes=" + ToText(sizes_), SumOf(sizes_), x.shape, axis);
    void* const y = context.Output(0, WithExtent(x.shape, axis, sizes_[group_.me]));
    if (Alone(x, y)) return;
    Run(x, x.shape, [&](Transport& transport, const Call& call) {
      transport.ReduceScatter(call, {x.type, op_}, x.data,
                              SlicesOf(x.shape, axis, ElementSize(x.type), sizes_), y);
    });
  }

  const int64_t axis_;
  const Sizes sizes_;
  const ReduceOp op_;
};

class AllToAll : public Collective {
 public:
  AllToAll(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("AllToAll", info, std::move(world)),
        split_axis_(AgreeInt(info, "split_axis")),
        concat_axis_(AgreeInt(info, "concat_axis")),
        // Along one axis, members have sizes of their own, which agree pair by pair.
        split_sizes_(split_axis_ == concat_axis_ ? NoteInts(info, "split_sizes")
                                                 : AgreeInts(info, "split_sizes")),
        concat_sizes_(split_axis_ == concat_axis_ ? NoteInts(info, "concat_sizes")
                                                  : AgreeInts(info, "concat_sizes")) {
    CheckSizes("split_sizes", split_sizes_, group_);
    CheckSizes("concat_sizes", concat_sizes_, group_);
    if (split_axis_ == concat_axis_) DeclareAmounts(&split_sizes_, &concat_sizes_);
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t split = NormalizeAxis(split_axis_, x.shape);
    const size_t concat = NormalizeAxis(concat_axis_, x.shape);
    CheckExtent("the sum of split_sizes=" + ToText(split_sizes_), SumOf(split_sizes_), x.shape,
                split);
    Shape y_shape = x.shape;
    Shape common = WithoutAxis(x.shape, split);
    if (split != concat) {
      CheckExtent("concat_sizes=" + ToText(concat_sizes_), concat_sizes_[group_.me], x.shape,
                  concat);
      y_shape[split] = split_sizes_[group_.me];
      common = WithExtent(x.shape, concat, 0);
    } else if (split_axis_ != concat_axis_) {
      throw std::runtime_error("split_axis=" + std::to_string(split_axis_) + " and concat_axis=" +
                               std::to_string(concat_axis_) +
                               " are one axis; give them the same number");
    } else if (split_sizes_[group_.me] != concat_sizes_[group_.me]) {
      throw std::runtime_error("split_sizes=" + ToText(split_sizes_) +
                               " and concat_sizes=" + ToText(concat_sizes_) +
                               " differ in what this rank keeps");
    }
    y_shape[concat] = SumOf(concat_sizes_);
    void* const y = context.Output(0, y_shape);
    if (Alone(x, y)) return;
    const size_t element = ElementSize(x.type);
    Run(x, common, [&](Transport& transport, const Call& call) {
      transport.Exchange(call, x.data, SlicesOf(x.shape, split, element, split_sizes_), y,
                         SlicesOf(y_shape, concat, element, concat_sizes_));
    });
  }

  const int64_t split_axis_;
  const int64_t concat_axis_;
  const Sizes split_sizes_;
  const Sizes concat_sizes_;
};

class Broadcast : public Collective {
 public:
  Broadcast(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("Broadcast", info, std::move(world)), root_(AgreeInt(info, "root")) {
    if (root_ < 0 || root_ >= static_cast<int64_t>(group_.ranks.size())) {
      throw std::runtime_error("root=" + std::to_string(root_) + " is not an index into group " +
                               ToText(group_.ranks));
    }
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    void* const y = context.Output(0, x.shape);
    if (Alone(x, y)) return;
    Run(x, x.shape, [&](Transport& transport, const Call& call) {
      if (call.me == root_ && x.data != y) std::memcpy(y, x.data, x.Bytes());
      transport.Broadcast(call, static_cast<int>(root_), y, x.Bytes());
    });
  }

  const int64_t root_;
};

/// The two ranks of a Send and its Recv.
Sizes PairWithPeer(const KernelInfo& info, const World& world) {
  const int64_t peer = info.Int("peer");
  if (peer == world.rank()) throw std::runtime_error("peer=" + std::to_string(peer) + " is itself");
  return {std::min<int64_t>(peer, world.rank()), std::max<int64_t>(peer, world.rank())};
}

/// Send and Recv are one collective of two ranks, of which the lower one is member 0.
class PointToPoint : public Collective {
 public:
  PointToPoint(const char* kind, bool sends, const KernelInfo& info, std::shared_ptr<World> world)
      : Collective(kind, info, world, PairWithPeer(info, *world)),
        sends_(sends),
        peer_(1 - group_.me) {
    Agree("from", group_.ranks[sends ? group_.me : peer_]);
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    void* const y = sends_ ? nullptr : context.Output(0, x.shape);
    const std::vector<Block> message = {onnxpar::Run(peer_, x.Bytes())};
    Run(x, x.shape, [&](Transport& transport, const Call& call) {
      transport.Exchange(call, x.data, sends_ ? message : std::vector<Block>(), y,
                         sends_ ? std::vector<Block>() : message);
    });
  }

  const bool sends_;
  const int peer_;
};

class NeighborExchange : public Collective {
 public:
  NeighborExchange(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("NeighborExchange", info, std::move(world)),
        axis_(AgreeInt(info, "axis")),
        before_(AgreeInts(info, "before")),
        after_(AgreeInts(info, "after")) {
    CheckSizes("before", before_, group_);
    CheckSizes("after", after_, group_);
    if (before_.front() != 0 || after_.back() != 0) {
      throw std::runtime_error("before=" + ToText(before_) + " must begin and after=" +
                               ToText(after_) + " end with 0: there is no neighbour");
    }
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t axis = NormalizeAxis(axis_, x.shape);
    const size_t element = ElementSize(x.type);
    const int me = group_.me;
    const int last = static_cast<int>(group_.ranks.size()) - 1;
    const int64_t extent = x.shape[axis];
    const Shape y_shape = WithExtent(x.shape, axis, before_[me] + extent + after_[me]);

    std::vector<Block> sends, receives;
    sends.push_back(SliceOf(x.shape, axis, element, me, 0, extent));
    receives.push_back(SliceOf(y_shape, axis, element, me, before_[me], extent));
    if (me > 0) {
      const int64_t width = after_[me - 1];
      CheckWidth(width, me - 1, x.shape, axis);
      sends.push_back(SliceOf(x.shape, axis, element, me - 1, 0, width));
      receives.push_back(SliceOf(y_shape, axis, element, me - 1, 0, before_[me]));
    }
    if (me < last) {
      const int64_t width = before_[me + 1];
      CheckWidth(width, me + 1, x.shape, axis);
      sends.push_back(SliceOf(x.shape, axis, element, me + 1, extent - width, width));
      receives.push_back(
          SliceOf(y_shape, axis, element, me + 1, before_[me] + extent, after_[me]));
    }
    void* const y = context.Output(0, y_shape);
    if (Alone(x, y)) return;
    Run(x, WithoutAxis(x.shape, axis), [&](Transport& transport, const Call& call) {
      transport.Exchange(call, x.data, sends, y, receives);
    });
  }

  void CheckWidth(int64_t width, int neighbor, const Shape& shape, size_t axis) const {
    if (width <= shape[axis]) return;
    throw std::runtime_error("rank " + std::to_string(group_.ranks[neighbor]) + " wants " +
                             std::to_string(width) + " elements along axis " +
                             std::to_string(axis) + ", but rank " +
                             std::to_string(world_->rank()) + " has X of shape " + ToText(shape));
  }

  const int64_t axis_;
  const Sizes before_;
  const Sizes after_;
};

/// A constant of this rank.
class Scalar : public Kernel {
 public:
  explicit Scalar(int64_t value) : value_(value) {}
  void Compute(KernelContext& context) override {
    *static_cast<int64_t*>(context.Output(0, {})) = value_;
  }

 private:
  const int64_t value_;
};

}  // namespace

std::unique_ptr<Kernel> MakeKernel(const std::string& kind, const KernelInfo& info,
                                   std::shared_ptr<World> world) {
  if (kind == "AllReduce") return std::make_unique<AllReduce>(info, world);
  if (kind == "AllGather") return std::make_unique<AllGather>(info, world);
  if (kind == "ReduceScatter") return std::make_unique<ReduceScatter>(info, world);
  if (kind == "AllToAll") return std::make_unique<AllToAll>(info, world);
  if (kind == "Broadcast") return std::make_unique<Broadcast>(info, world);
  if (kind == "Send") return std::make_unique<PointToPoint>("Send", true, info, world);
  if (kind == "Recv") return std::make_unique<PointToPoint>("Recv", false, info, world);
  if (kind == "NeighborExchange") return std::make_unique<NeighborExchange>(info, world);
  const Group& group = world->GroupOf(info.IntsOrNone("group"));
  if (kind == "Rank") return std::make_unique<Scalar>(group.me);
  return std::make_unique<Scalar>(static_cast<int64_t>(group.ranks.size()));
}

}  // namespace onnxpar
