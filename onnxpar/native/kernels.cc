#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "axis.h"
#include "block.h"
#include "collective.h"
#include "elementwise_kernel.h"
#include "message_kernels.h"
#include "paged_attention.h"
#include "started.h"

namespace onnxpar {
namespace {

using Sizes = std::vector<int64_t>;

/// Returns the default sizes of `parts` shards of `extent` elements: as equal as possible, larger
/// ones first, e.g. [3, 2] for 5 elements.
Sizes EqualParts(int64_t extent, size_t parts) {
  Sizes sizes;
  for (size_t i = 0; i < parts; ++i) {
    sizes.push_back(static_cast<int64_t>(PartOf(static_cast<size_t>(extent), parts, i).size));
  }
  return sizes;
}

/// Returns the content of an operand that has one size for each member of the group. Throws if it
/// has another shape or a negative size.
Sizes MemberSizes(const char* operand, const Tensor& sizes, const Group& group) {
  const size_t members = group.ranks.size();
  if (sizes.shape != Shape{static_cast<int64_t>(members)}) {
    throw std::runtime_error(std::string(operand) + " has shape " + ToText(sizes.shape) +
                             ", not [" + std::to_string(members) + "], a size for each rank of " +
                             "group " + ToText(group.ranks));
  }
  const auto* const first = static_cast<const int64_t*>(sizes.data);
  const Sizes found(first, first + members);
  if (std::all_of(found.begin(), found.end(), [](int64_t s) { return s >= 0; })) return found;
  throw std::runtime_error(std::string(operand) + "=" + ToText(found) + " has a negative size");
}

/// Returns the sizes of the shards into which an op divides X: its attribute if that is not empty,
/// else its optional input `sizes`; without both, as EqualParts.
Sizes CutSizes(const Sizes& attribute, const KernelContext& context, int64_t extent,
               const Group& group) {
  if (!attribute.empty()) return attribute;
  if (context.Has(Collective::kSizes)) {
    return MemberSizes("sizes", context.Input(Collective::kSizes), group);
  }
  return EqualParts(extent, group.ranks.size());
}

/// Concatenates the values on which members must agree: a part of the shape of X, and the shard
/// sizes.
Shape Joined(Shape common, const Sizes& sizes) {
  common.insert(common.end(), sizes.begin(), sizes.end());
  return common;
}

/// Throws unless X has size `expected` along `axis`; `attribute` is the text that requires this
/// size.
void CheckExtent(const std::string& attribute, int64_t expected, const Shape& shape, size_t axis) {
  if (shape[axis] == expected) return;
  throw std::runtime_error("X has shape " + ToText(shape) + ", that is " +
                           std::to_string(shape[axis]) + " along axis " + std::to_string(axis) +
                           ", but " + attribute + " requires " + std::to_string(expected));
}

class AllReduce : public Collective {
 public:
  AllReduce(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("AllReduce", info, std::move(world)),
        op_(ParseReduceOp(AgreeString(info, "op", "sum"))) {}

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    if (Alone(context, x)) return;
    void* const y = context.Output(0, x.shape);
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
        sizes_(AgreeSizes(info, "sizes")) {}

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t axis = NormalizeAxis(axis_, x.shape);
    if (!sizes_.empty()) {
      CheckExtent("sizes=" + ToText(sizes_), sizes_[group_.me], x.shape, axis);
    }
    if (Alone(context, x)) return;
    Run(x, WithoutAxis(x.shape, axis), [&](Transport& transport, const Call& call) {
      const Sizes sizes = sizes_.empty() ? GatherExtents(transport, call, x.shape[axis]) : sizes_;
      const Shape y_shape = WithExtent(x.shape, axis, SumOf(sizes));
      void* const y = context.Output(0, y_shape);
      transport.AllGather(call, x.data, y, SlicesOf(y_shape, axis, ElementSize(x.type), sizes));
    });
  }

  Shape ResultShape(const KernelContext& context) const override {
    const Shape x = context.Input(0).shape;
    return WithExtent(x, NormalizeAxis(axis_, x), SumOf(sizes_));
  }

  const int64_t axis_;
  const Sizes sizes_;
};

class ReduceScatter : public Collective {
 public:
  ReduceScatter(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("ReduceScatter", info, std::move(world)),
        axis_(AgreeInt(info, "axis")),
        sizes_(AgreeSizes(info, "sizes")),
        op_(ParseReduceOp(AgreeString(info, "op", "sum"))) {}

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t axis = NormalizeAxis(axis_, x.shape);
    const Sizes sizes = CutSizes(sizes_, context, x.shape[axis], group_);
    CheckExtent("the sum of sizes=" + ToText(sizes), SumOf(sizes), x.shape, axis);
    if (Alone(context, x)) return;
    void* const y = context.Output(0, WithExtent(x.shape, axis, sizes[group_.me]));
    Run(x, Joined(x.shape, sizes), [&](Transport& transport, const Call& call) {
      transport.ReduceScatter(call, {x.type, op_}, x.data,
                              SlicesOf(x.shape, axis, ElementSize(x.type), sizes), y);
    });
  }

  Shape ResultShape(const KernelContext& context) const override {
    const Shape x = context.Input(0).shape;
    const size_t axis = NormalizeAxis(axis_, x);
    return WithExtent(x, axis, CutSizes(sizes_, context, x[axis], group_)[group_.me]);
  }

  const int64_t axis_;
  const Sizes sizes_;
  const ReduceOp op_;
};

/// Divides X along one axis into slices, one for each member, and concatenates the slices that this
/// rank receives along another axis: with 2 ranks, [4, 6] split on axis 0 becomes [2, 12].
class AllToAll : public Collective {
 public:
  AllToAll(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("AllToAll", info, std::move(world)),
        split_axis_(AgreeInt(info, "split_axis")),
        concat_axis_(AgreeInt(info, "concat_axis")),
        split_sizes_(AgreeSizes(info, "split_sizes")),
        concat_sizes_(AgreeSizes(info, "concat_sizes")) {}

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t split = NormalizeAxis(split_axis_, x.shape);
    const size_t concat = NormalizeAxis(concat_axis_, x.shape);
    if (split == concat) {
      throw std::runtime_error("split_axis=" + std::to_string(split_axis_) +
                               " and concat_axis=" + std::to_string(concat_axis_) +
                               " are the same axis; write it with the same number in both");
    }
    const Sizes split_sizes = CutSizes(split_sizes_, context, x.shape[split], group_);
    CheckExtent("the sum of split_sizes=" + ToText(split_sizes), SumOf(split_sizes), x.shape,
                split);
    if (!concat_sizes_.empty()) {
      CheckExtent("concat_sizes=" + ToText(concat_sizes_), concat_sizes_[group_.me], x.shape,
                  concat);
    }
    if (Alone(context, x)) return;
    const size_t element = ElementSize(x.type);
    const Shape common = Joined(WithoutAxis(x.shape, concat), split_sizes);
    Run(x, common, [&](Transport& transport, const Call& call) {
      const Sizes concat_sizes =
          concat_sizes_.empty() ? GatherExtents(transport, call, x.shape[concat]) : concat_sizes_;
      Shape y_shape = WithExtent(x.shape, concat, SumOf(concat_sizes));
      y_shape[split] = split_sizes[call.me];
      void* const y = context.Output(0, y_shape);
      transport.Exchange(call, x.data, SlicesOf(x.shape, split, element, split_sizes), y,
                         SlicesOf(y_shape, concat, element, concat_sizes));
    });
  }

  Shape ResultShape(const KernelContext& context) const override {
    const Shape x = context.Input(0).shape;
    const size_t split = NormalizeAxis(split_axis_, x);
    const Sizes sizes = CutSizes(split_sizes_, context, x[split], group_);
    Shape y_shape = WithExtent(x, split, sizes[group_.me]);
    y_shape[NormalizeAxis(concat_axis_, x)] = SumOf(concat_sizes_);
    return y_shape;
  }

  const int64_t split_axis_;
  const int64_t concat_axis_;
  const Sizes split_sizes_;
  const Sizes concat_sizes_;
};

/// An AllToAll whose split axis is also its concatenation axis: it moves the bounds between the
/// members' shards, e.g. from sizes [4, 4] to [5, 3]. Members send different sizes: what one member
/// sends to another must be what the other expects from it.
class Redistribute : public Collective {
 public:
  Redistribute(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("AllToAll", info, std::move(world)),
        axis_(AgreeInt(info, "split_axis")),
        gives_(NoteSizes(info, "split_sizes")),
        takes_(NoteSizes(info, "concat_sizes")) {
    if (group_.ranks.size() > 1 && (gives_.empty() || takes_.empty())) {
      throw std::runtime_error(
          "if split_axis equals concat_axis, split_sizes and concat_sizes must be given");
    }
    if (!gives_.empty() && !takes_.empty() && gives_[group_.me] != takes_[group_.me]) {
      throw std::runtime_error("split_sizes=" + ToText(gives_) +
                               " and concat_sizes=" + ToText(takes_) +
                               " give different sizes for the elements that this rank keeps");
    }
    DeclareAmounts(&gives_, &takes_);
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t axis = NormalizeAxis(axis_, x.shape);
    if (!gives_.empty()) {
      CheckExtent("the sum of split_sizes=" + ToText(gives_), SumOf(gives_), x.shape, axis);
    }
    if (Alone(context, x)) return;
    const size_t element = ElementSize(x.type);
    const Shape y_shape = WithExtent(x.shape, axis, SumOf(takes_));
    void* const y = context.Output(0, y_shape);
    Run(x, WithoutAxis(x.shape, axis), [&](Transport& transport, const Call& call) {
      transport.Exchange(call, x.data, SlicesOf(x.shape, axis, element, gives_), y,
                         SlicesOf(y_shape, axis, element, takes_));
    });
  }

  Shape ResultShape(const KernelContext& context) const override {
    const Shape x = context.Input(0).shape;
    return WithExtent(x, NormalizeAxis(axis_, x), SumOf(takes_));
  }

  const int64_t axis_;
  const Sizes gives_;
  const Sizes takes_;
};

/// Sends member i the next `sends[i]` elements along one axis, and concatenates the received
/// elements along the same axis. Both lists are inputs: `receives[i]` must be the number that
/// member i sends to this rank. The token has the shape [0, bytes sent to other members].
class AllToAllV : public Collective {
 public:
  AllToAllV(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("AllToAllV", info, std::move(world)), axis_(AgreeInt(info, "axis")) {}

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const size_t axis = NormalizeAxis(axis_, x.shape);
    const Sizes sends = Sends(context);
    const Sizes receives = Receives(context);
    CheckExtent("the sum of sends=" + ToText(sends), SumOf(sends), x.shape, axis);
    if (sends[group_.me] != receives[group_.me]) {
      throw std::runtime_error("sends=" + ToText(sends) + " and receives=" + ToText(receives) +
                               " give different sizes for the elements that this rank keeps");
    }
    if (Alone(context, x)) return;
    const size_t element = ElementSize(x.type);
    const Shape y_shape = ResultShape(context);
    void* const y = context.Output(0, y_shape);
    Run(
        x, WithoutAxis(x.shape, axis),
        [&](Transport& transport, const Call& call) {
          transport.Exchange(call, x.data, SlicesOf(x.shape, axis, element, sends), y,
                             SlicesOf(y_shape, axis, element, receives));
        },
        &sends, &receives);
  }

  Shape ResultShape(const KernelContext& context) const override {
    const Shape x = context.Input(0).shape;
    return WithExtent(x, NormalizeAxis(axis_, x), SumOf(Receives(context)));
  }

  Shape TokenShape(const KernelContext& context) const override {
    const Tensor x = context.Input(0);
    const size_t axis = NormalizeAxis(axis_, x.shape);
    const int64_t others = x.shape[axis] - Sends(context)[group_.me];
    const Tensor sent{x.type, WithExtent(x.shape, axis, others), nullptr};
    return {0, static_cast<int64_t>(sent.Bytes())};
  }

  Sizes Sends(const KernelContext& context) const {
    return MemberSizes("sends", context.Input(1), group_);
  }
  Sizes Receives(const KernelContext& context) const {
    return MemberSizes("receives", context.Input(2), group_);
  }

  const int64_t axis_;
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
    if (Alone(context, x)) return;
    void* const y = context.Output(0, x.shape);
    Run(x, x.shape, [&](Transport& transport, const Call& call) {
      if (call.me == root_) CopyTensor(x, y);
      transport.Broadcast(call, static_cast<int>(root_), y, x.Bytes());
    });
  }

  const int64_t root_;
};

/// Returns X unchanged. Its second input, the token of an earlier collective, makes onnxruntime run
/// this node, and the nodes that need its result, after that collective. Does not communicate.
class Gate : public Kernel {
 public:
  void Compute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    void* const y = context.Output(0, x.shape);
    if (x.data != y && x.Bytes() > 0) std::memcpy(y, x.data, x.Bytes());
    context.Output(1, {0});
  }
};

/// Returns an integer that is known when the session is created: this rank's index in its group, or
/// the group's size.
class Scalar : public Kernel {
 public:
  explicit Scalar(int64_t value) : value_(value) {}
  void Compute(KernelContext& context) override {
    *static_cast<int64_t*>(context.Output(0, {})) = value_;
  }

 private:
  const int64_t value_;
};

/// Returns a new kernel for an op of type `kind` that also exists as StartX, which runs the
/// collective in the background; null for other ops.
std::unique_ptr<Collective> MakeCollective(const std::string& kind, const KernelInfo& info,
                                           std::shared_ptr<World> world) {
  if (kind == "AllReduce") return std::make_unique<AllReduce>(info, world);
  if (kind == "AllGather") return std::make_unique<AllGather>(info, world);
  if (kind == "ReduceScatter") return std::make_unique<ReduceScatter>(info, world);
  if (kind == "AllToAll" && info.Int("split_axis") == info.Int("concat_axis")) {
    return std::make_unique<Redistribute>(info, world);
  }
  if (kind == "AllToAll") return std::make_unique<AllToAll>(info, world);
  if (kind == "AllToAllV") return std::make_unique<AllToAllV>(info, world);
  return nullptr;
}

constexpr char kStart[] = "Start";

}  // namespace

std::unique_ptr<Kernel> MakeKernel(const std::string& kind, const KernelInfo& info,
                                   std::shared_ptr<World> world) {
  if (kind.rfind(kStart, 0) == 0) {
    const std::string started = kind.substr(sizeof(kStart) - 1);
    return MakeStart(MakeCollective(started, info, world), started == "AllReduce", world);
  }
  if (auto kernel = MakeCollective(kind, info, world)) return kernel;
  if (kind == "Complete") return MakeComplete();
  if (kind == "After") return MakeAfter();
  if (kind == "Broadcast") return std::make_unique<Broadcast>(info, world);
  if (auto kernel = MakeMessageKernel(kind, info, world)) return kernel;
  if (kind == "Gate") return std::make_unique<Gate>();
  if (kind == "FusedElementwise") return MakeFusedElementwise(info);
  if (kind == "PagedAttention") return MakePagedAttention(info);
  if (kind == "PagedAttentionPart") return MakePagedAttentionPart(info);
  const Group& group = world->GroupOf(info.IntsOrNone("group"));
  if (kind == "Rank") return std::make_unique<Scalar>(group.me);
  return std::make_unique<Scalar>(static_cast<int64_t>(group.ranks.size()));
}

}  // namespace onnxpar
