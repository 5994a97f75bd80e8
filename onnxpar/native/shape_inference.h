// Shape inference of the ops, while onnxruntime loads a model.
#pragma once

#include "ort.h"
#include "world.h"

namespace onnxpar {

/// A function that sets the output shapes of a node as far as they follow from its input shapes and
/// attributes. `world` is null if the session has none; then shapes that depend on this rank's
/// index are unknown.
using InferShapes = void (*)(ShapeContext& node, const World* world);

void InferSameShape(ShapeContext& node, const World* world);
void InferAllGather(ShapeContext& node, const World* world);
void InferReduceScatter(ShapeContext& node, const World* world);
void InferAllToAll(ShapeContext& node, const World* world);
void InferCollectivePermute(ShapeContext& node, const World* world);
void InferNeighborExchange(ShapeContext& node, const World* world);
void InferOpenAxis(ShapeContext& node, const World* world);
void InferAllToAllV(ShapeContext& node, const World* world);
void InferComplete(ShapeContext& node, const World* world);
void InferTokenOnly(ShapeContext& node, const World* world);
void InferScalar(ShapeContext& node, const World* world);
void InferPagedAttention(ShapeContext& node, const World* world);
void InferPagedAttentionPart(ShapeContext& node, const World* world);
void InferElementwise(ShapeContext& node, const World* world);

/// The shape inference of an op StartX; `infer` is that of the collective X. Output 0 has the shape
/// [0, number of the started collective, the dimensions of X's result].
template <InferShapes infer>
void InferStart(ShapeContext& node, const World* world) {
  node.PrefixOutput({{0, ""}, {}});  // and the number of the started collective
  infer(node, world);
}

}  // namespace onnxpar
