#include "message_kernels.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "axis.h"
#include "block.h"
#include "collective.h"

namespace onnxpar {
namespace {

using Sizes = std::vector<int64_t>;

/// Returns the group of a Send or a Recv: this rank and its peer, in ascending order; only this
/// rank if the attribute `peer` is -1.
Sizes PairWithPeer(const KernelInfo& info, const World& world) {
  const int64_t peer = info.Int("peer");
  if (peer == -1) return {world.rank()};
  if (peer == world.rank())
    throw std::runtime_error("peer=" + std::to_string(peer) +
                             " is this rank itself; give another rank, or -1 for none");
  return {std::min<int64_t>(peer, world.rank()), std::max<int64_t>(peer, world.rank())};
}

/// A Send or a Recv. A Send and its Recv are one collective of two ranks, of which the lower one is
/// member 0. With peer=-1, a rank does not communicate: its Send does nothing, and its Recv returns
/// X, its own operand.
class PointToPoint : public Collective {
 public:
  PointToPoint(const char* kind, bool sends, const KernelInfo& info, std::shared_ptr<World> world)
      : Collective(kind, info, world, PairWithPeer(info, *world)),
        sends_(sends),
        peer_(1 - group_.me) {
    if (group_.ranks.size() > 1) Agree("from", group_.ranks[sends ? group_.me : peer_]);
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    if (group_.ranks.size() == 1 && sends_) return;
    if (Alone(context, x)) return;
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

/// Gives each member the whole X of one member: `sources[i]` is the member whose X member i gets,
/// or -1 for zeros. E.g. sources=[2, 0, 1] passes each X on to the next of 3 members.
class CollectivePermute : public Collective {
 public:
  CollectivePermute(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("CollectivePermute", info, std::move(world)),
        sources_(AgreeInts(info, "sources")),
        shapes_(AgreeInts(info, "shapes")) {
    const auto count = static_cast<int64_t>(group_.ranks.size());
    Sizes readers(group_.ranks.size());
    bool valid = static_cast<int64_t>(sources_.size()) == count;
    for (int64_t source : sources_) {
      valid = valid && -1 <= source && source < count && (source < 0 || ++readers[source] == 1);
    }
    if (valid) return;
    throw std::runtime_error("sources=" + ToText(sources_) + " must give, for each of the " +
                             std::to_string(count) + " ranks of group " + ToText(group_.ranks) +
                             ", another index into the group, or -1 for a rank that gets nothing");
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    if (!shapes_.empty()) CheckShape(x.shape);
    const int me = group_.me;
    const int source = static_cast<int>(sources_[me]);
    const int reader = ReaderOf(me);
    const auto output = [&](const Shape& shape) {
      void* const y = context.Output(0, shape);
      if (source < 0 && x.Bytes() > 0) std::memset(y, 0, x.Bytes());
      if (source == me) CopyTensor(x, y);
      return y;
    };
    if (group_.ranks.size() == 1) {
      output(x.shape);
      return;
    }
    Run(x, CommonShape(x.shape), [&](Transport& transport, const Call& call) {
      const bool known = !shapes_.empty() || x.shape.empty();
      const Sizes shapes = known ? shapes_ : GatherNumbers(transport, call, x.shape);
      const Shape y_shape = source < 0 ? x.shape : ShapeOn(source, shapes, x.shape);
      void* const y = output(y_shape);
      std::vector<Block> sends, receives;
      if (reader >= 0 && reader != me) sends.push_back(onnxpar::Run(reader, x.Bytes()));
      if (source >= 0 && source != me) {
        receives.push_back(onnxpar::Run(source, Tensor{x.type, y_shape, nullptr}.Bytes()));
      }
      transport.Exchange(call, x.data, sends, y, receives);
    });
  }

  /// Returns the member that gets the X of `member`; -1 if none does.
  int ReaderOf(int member) const {
    const auto found = std::find(sources_.begin(), sources_.end(), member);
    return found == sources_.end() ? -1 : static_cast<int>(found - sources_.begin());
  }

  /// Returns the part of this rank's shape on which all members must agree: the sizes that are -1
  /// in `shapes`; without `shapes`, only the number of dimensions.
  Shape CommonShape(const Shape& x) const {
    if (shapes_.empty()) return {static_cast<int64_t>(x.size())};
    Shape common;
    for (size_t i = 0; i < x.size(); ++i) {
      if (shapes_[i] == -1) common.push_back(x[i]);
    }
    return common;
  }

  /// Returns the shape of X on a member. `shapes` has the sizes for each member one after the
  /// other, or once for all; a -1 stands for the size in `own`, this rank's shape.
  Shape ShapeOn(int member, const Sizes& shapes, const Shape& own) const {
    const size_t first = shapes.size() == own.size() ? 0 : own.size() * member;
    Shape shape(shapes.begin() + first, shapes.begin() + first + own.size());
    for (size_t i = 0; i < shape.size(); ++i) {
      if (shape[i] == -1) shape[i] = own[i];
    }
    for (int64_t size : shape) SumOf({size});  // throws if it is negative
    return shape;
  }

  void CheckShape(const Shape& x) const {
    const bool complete = shapes_.size() == x.size() * group_.ranks.size();
    if ((complete || shapes_.size() == x.size()) && ShapeOn(group_.me, shapes_, x) == x) return;
    throw std::runtime_error("X has shape " + ToText(x) + ", but shapes=" + ToText(shapes_) +
                             " gives another one");
  }

  const Sizes sources_;
  const Sizes shapes_;
};

/// Extends each member's X along one axis by the adjacent elements of its two neighbours: by
/// `before[i]` elements of member i-1 and `after[i]` of member i+1, as a convolution needs.
class NeighborExchange : public Collective {
 public:
  NeighborExchange(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("NeighborExchange", info, std::move(world)),
        axis_(AgreeInt(info, "axis")),
        before_(AgreeSizes(info, "before")),
        after_(AgreeSizes(info, "after")) {
    if (group_.ranks.size() == 1 && before_.empty() && after_.empty()) return;  // nothing to get
    if (before_.empty() || after_.empty()) {
      throw std::runtime_error("attributes 'before' and 'after' (ints) must be given");
    }
    if (before_.front() != 0 || after_.back() != 0) {
      throw std::runtime_error(
          "before=" + ToText(before_) + " must begin with 0, and after=" + ToText(after_) +
          " must end with 0: the first and the last rank have no neighbour there");
    }
  }

 private:
  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    if (Alone(context, x)) return;
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
      receives.push_back(SliceOf(y_shape, axis, element, me + 1, before_[me] + extent, after_[me]));
    }
    void* const y = context.Output(0, y_shape);
    Run(x, WithoutAxis(x.shape, axis), [&](Transport& transport, const Call& call) {
      transport.Exchange(call, x.data, sends, y, receives);
    });
  }

  void CheckWidth(int64_t width, int neighbor, const Shape& shape, size_t axis) const {
    if (width <= shape[axis]) return;
    throw std::runtime_error("rank " + std::to_string(group_.ranks[neighbor]) + " requests " +
                             std::to_string(width) + " elements along axis " +
                             std::to_string(axis) + ", but rank " + std::to_string(world_->rank()) +
                             " has X of shape " + ToText(shape));
  }

  const int64_t axis_;
  const Sizes before_;
  const Sizes after_;
};

/// Gives each member a range of a dimension that is sharded over the members: the elements
/// bounds[0] to bounds[1] - 1, counted over all shards. The sizes of shards and the bounds depend
/// on data, so the members exchange them first.
class HaloExchange : public Collective {
 public:
  HaloExchange(const KernelInfo& info, std::shared_ptr<World> world)
      : Collective("HaloExchange", info, std::move(world)), axis_(AgreeInt(info, "axis")) {}

 private:
  /// The elements `begin` to `end` - 1 of the sharded dimension, counted over all shards.
  struct Span {
    int64_t begin, end;
  };
  struct Member {
    Span held, wanted;
  };

  void Execute(KernelContext& context) override {
    const Tensor x = context.Input(0);
    const Tensor bounds = context.Input(1);
    if (bounds.Elements() != 2) {
      throw std::runtime_error("bounds has shape " + ToText(bounds.shape) + ", not [2]");
    }
    const size_t axis = NormalizeAxis(axis_, x.shape);
    const int64_t* const wanted = static_cast<const int64_t*>(bounds.data);
    const Sizes own = {x.shape[axis], wanted[0], wanted[1]};
    const size_t element = ElementSize(x.type);
    if (group_.ranks.size() == 1) {
      const Member me = MembersOf(own).front();
      const Shape y_shape = WithExtent(x.shape, axis, me.wanted.end - me.wanted.begin);
      CopyBlock(x.data, Shared(x.shape, axis, element, 0, me.held, me), context.Output(0, y_shape),
                Shared(y_shape, axis, element, 0, me.wanted, me));
      return;
    }
    Run(x, WithoutAxis(x.shape, axis), [&](Transport& transport, const Call& call) {
      const std::vector<Member> members = MembersOf(GatherNumbers(transport, call, own));
      const Member& me = members[call.me];
      const Shape y_shape = WithExtent(x.shape, axis, me.wanted.end - me.wanted.begin);
      void* const y = context.Output(0, y_shape);
      std::vector<Block> sends, receives;
      for (int i = 0; i < call.size(); ++i) {
        const Block give = Shared(x.shape, axis, element, i, me.held, {me.held, members[i].wanted});
        const Block take =
            Shared(y_shape, axis, element, i, me.wanted, {members[i].held, me.wanted});
        if (give.Bytes() == 0 && take.Bytes() == 0) continue;
        sends.push_back(give);
        receives.push_back(take);
      }
      transport.Exchange(call, x.data, sends, y, receives);
    });
  }

  /// Returns the place of the elements that are both in `both.held` (the shard of one member) and
  /// in `both.wanted` (what another member needs), in a tensor that has the elements `all` along
  /// `axis`.
  static Block Shared(const Shape& shape, size_t axis, size_t element, int member, const Span& all,
                      const Member& both) {
    const int64_t begin = std::max(both.held.begin, both.wanted.begin);
    const int64_t end = std::min(both.held.end, both.wanted.end);
    if (begin >= end) return SliceOf(shape, axis, element, member, 0, 0);
    return SliceOf(shape, axis, element, member, begin - all.begin, end - begin);
  }

  /// Returns each member's shard and wanted range. `numbers` has three numbers for each member: the
  /// size of its shard, and its two bounds. Throws if they are invalid.
  std::vector<Member> MembersOf(const Sizes& numbers) const {
    std::vector<Member> members;
    Sizes held;
    for (size_t i = 0; i < numbers.size(); i += 3) held.push_back(numbers[i]);
    SumOf(held);  // throws unless the members sent valid sizes
    int64_t begin = 0;
    for (size_t i = 0; i < numbers.size(); i += 3) {
      members.push_back({{begin, begin + numbers[i]}, {numbers[i + 1], numbers[i + 2]}});
      begin += numbers[i];
    }
    for (size_t i = 0; i < members.size(); ++i) {
      const Span& wanted = members[i].wanted;
      if (0 <= wanted.begin && wanted.begin <= wanted.end && wanted.end <= begin) continue;
      throw std::runtime_error("rank " + std::to_string(group_.ranks[i]) + " requests elements " +
                               std::to_string(wanted.begin) + " to " + std::to_string(wanted.end) +
                               " along axis " + std::to_string(axis_) + ", which has " +
                               std::to_string(begin) + " elements");
    }
    return members;
  }

  const int64_t axis_;
};

}  // namespace

std::unique_ptr<Kernel> MakeMessageKernel(const std::string& kind, const KernelInfo& info,
                                          std::shared_ptr<World> world) {
  if (kind == "Send") return std::make_unique<PointToPoint>("Send", true, info, world);
  if (kind == "Recv") return std::make_unique<PointToPoint>("Recv", false, info, world);
  if (kind == "CollectivePermute") return std::make_unique<CollectivePermute>(info, world);
  if (kind == "NeighborExchange") return std::make_unique<NeighborExchange>(info, world);
  if (kind == "HaloExchange") return std::make_unique<HaloExchange>(info, world);
  return nullptr;
}

}  // namespace onnxpar
