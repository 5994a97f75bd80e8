#include "shape_inference.h"

#include <algorithm>
#include <vector>

#include "axis.h"

namespace onnxpar {
namespace {

using Dimensions = std::vector<Dimension>;

void SetToken(ShapeContext& node, size_t output) {
  node.SetOutput(output, DataType::kBool, {{0, ""}});
}

/// Returns this rank's index in the node's group; -1 if there is no world, or the rank is not in
/// the group.
int MemberOf(const ShapeContext& node, const World* world) {
  if (world == nullptr) return -1;
  const std::vector<int64_t> group = node.Ints("group");
  if (group.empty()) return world->rank();
  const auto me = std::find(group.begin(), group.end(), world->rank());
  return me == group.end() ? -1 : static_cast<int>(me - group.begin());
}

/// Returns sizes[me] as a dimension; an unknown dimension if there is no such element.
Dimension Mine(const std::vector<int64_t>& sizes, int me) {
  if (me < 0 || me >= static_cast<int>(sizes.size())) return {};
  return {sizes[me], ""};
}

/// Returns the sum of `sizes` as a dimension; an unknown dimension if `sizes` is empty.
Dimension Total(const std::vector<int64_t>& sizes) {
  return sizes.empty() ? Dimension{} : Dimension{SumOf(sizes), ""};
}

/// Returns the axis that an attribute gives, counted from 0; x.size() if `x` does not have the
/// axis.
size_t AxisOf(const ShapeContext& node, const char* attribute, const Dimensions& x) {
  const int64_t rank = static_cast<int64_t>(x.size());
  const int64_t axis = node.Int(attribute, rank);
  if (axis < -rank || axis >= rank) return x.size();
  return static_cast<size_t>(axis < 0 ? axis + rank : axis);
}

/// Sets the shapes of the outputs that PagedAttention and PagedAttentionPart have in common: the
/// result, of type `type`, and the two caches.
void InferAttended(ShapeContext& node, DataType type) {
  const Dimensions keys = node.Input(3);
  Dimensions result = node.Input(0);
  if (result.size() == 3) {
    const bool known = keys.size() == 4 && keys[3].size >= 0;
    const int64_t width = known ? keys[3].size - node.Int("scale_bytes", 0) : 0;
    result[2] = known ? Dimension{node.Int("num_heads", 0) * width, ""} : Dimension{};
    node.SetOutput(0, type, result);
  }
  for (size_t i : {1, 2}) {
    const Dimensions cache = node.Input(2 + i);
    if (!cache.empty()) node.SetOutput(i, node.InputType(2 + i), cache);
  }
}

}  // namespace

void InferSameShape(ShapeContext& node, const World*) {
  const Dimensions x = node.Input(0);
  if (!x.empty()) node.SetOutput(0, node.InputType(0), x);
  SetToken(node, 1);
}

void InferElementwise(ShapeContext& node, const World*) {
  const Dimensions x = node.Input(0);
  for (size_t i = 0; i < node.Ints("results").size() && !x.empty(); ++i) {
    node.SetOutput(i, node.InputType(0), x);
  }
}

void InferPagedAttention(ShapeContext& node, const World*) {
  InferAttended(node, node.InputType(0));
}

void InferPagedAttentionPart(ShapeContext& node, const World*) {
  InferAttended(node, DataType::kFloat);
  Dimensions sums = node.Input(0);
  if (sums.size() != 3) return;
  sums[2] = {node.Int("num_heads", 0), ""};
  node.SetOutput(3, DataType::kFloat, sums);
}

void InferAllGather(ShapeContext& node, const World*) {
  SetToken(node, 1);
  Dimensions y = node.Input(0);
  const size_t axis = AxisOf(node, "axis", y);
  if (axis == y.size()) return;
  y[axis] = Total(node.Ints("sizes"));
  node.SetOutput(0, node.InputType(0), y);
}

void InferReduceScatter(ShapeContext& node, const World* world) {
  SetToken(node, 1);
  Dimensions y = node.Input(0);
  const size_t axis = AxisOf(node, "axis", y);
  if (axis == y.size()) return;
  y[axis] = Mine(node.Ints("sizes"), MemberOf(node, world));
  node.SetOutput(0, node.InputType(0), y);
}

void InferAllToAll(ShapeContext& node, const World* world) {
  SetToken(node, 1);
  Dimensions y = node.Input(0);
  const size_t split = AxisOf(node, "split_axis", y);
  const size_t concat = AxisOf(node, "concat_axis", y);
  if (split == y.size() || concat == y.size()) return;
  y[split] = Mine(node.Ints("split_sizes"), MemberOf(node, world));
  y[concat] = Total(node.Ints("concat_sizes"));
  node.SetOutput(0, node.InputType(0), y);
}

void InferCollectivePermute(ShapeContext& node, const World* world) {
  SetToken(node, 1);
  Dimensions y = node.Input(0);
  if (y.empty()) return;
  const std::vector<int64_t> shapes = node.Ints("shapes");
  const int64_t source = Mine(node.Ints("sources"), MemberOf(node, world)).size;
  const bool one = shapes.size() == y.size();  // shape for all members
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t at = one ? i : static_cast<size_t>(std::max<int64_t>(source, 0)) * y.size() + i;
    const bool known = at < shapes.size() && (one || source >= 0);
    if (known && shapes[at] == -1) continue;  // members have the same size
    y[i] = known ? Dimension{shapes[at], ""} : Dimension{};
  }
  node.SetOutput(0, node.InputType(0), y);
}

void InferNeighborExchange(ShapeContext& node, const World* world) {
  SetToken(node, 1);
  Dimensions y = node.Input(0);
  const size_t axis = AxisOf(node, "axis", y);
  if (axis == y.size()) return;
  const int me = MemberOf(node, world);
  const Dimension before = Mine(node.Ints("before"), me);
  const Dimension after = Mine(node.Ints("after"), me);
  const bool known = y[axis].size >= 0 && before.size >= 0 && after.size >= 0;
  y[axis] = known ? Dimension{before.size + y[axis].size + after.size, ""} : Dimension{};
  node.SetOutput(0, node.InputType(0), y);
}

void InferOpenAxis(ShapeContext& node, const World*) {
  SetToken(node, 1);
  Dimensions y = node.Input(0);
  const size_t axis = AxisOf(node, "axis", y);
  if (axis == y.size()) return;
  y[axis] = Dimension{};
  node.SetOutput(0, node.InputType(0), y);
}

void InferAllToAllV(ShapeContext& node, const World* world) {
  InferOpenAxis(node, world);
  node.SetOutput(1, DataType::kBool, {{0, ""}, Dimension{}});
}

void InferComplete(ShapeContext& node, const World*) {
  const Dimensions pending = node.Input(0);
  if (pending.size() >= 2) {
    node.SetOutput(0, node.InputType(0), {pending.begin() + 2, pending.end()});
  }
}

void InferTokenOnly(ShapeContext& node, const World*) { SetToken(node, 0); }

void InferScalar(ShapeContext& node, const World*) { node.SetOutput(0, DataType::kInt64, {}); }

}  // namespace onnxpar
