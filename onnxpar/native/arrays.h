// Collectives on the caller's arrays, without an onnxruntime session. The ranks of a group of
// the world take part.
//
// As for the ops, all ranks throw if ranks disagree, for example on the name, or if a rank dies.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ort.h"
#include "world.h"

namespace onnxpar {

/// One rank's input of a collective.
struct Array {
  std::shared_ptr<World> world;
  std::vector<int64_t> ranks;  // the group, in its order; empty for all ranks of the world
  std::string name;            // the same on all ranks; may be empty
  std::string
      details;  // further values that must be the same on all ranks, as text for error messages
  DataType type;
  Shape shape;
  const void* data;

  size_t GroupSize() const {
    return ranks.empty() ? static_cast<size_t>(world->size()) : ranks.size();
  }
};

/// The caller's function that allocates the result: `rows` has each rank's size of dimension 0.
/// Returns null if there is not enough memory.
using Allocate = void* (*)(const int64_t* rows);

/// Reduces over the ranks into `out`, which may be the array's own memory. `op` is sum, max, min,
/// prod or, for floats, mean.
void AllReduceArray(const Array& x, const std::string& op, void* out);

/// Reduces over the ranks, divides the result along dimension 0, and writes this rank's shard to
/// `out`. Shards are as equal as possible, larger ones first.
void ReduceScatterArray(const Array& x, const std::string& op, void* out);

/// Joins the ranks' arrays along dimension 0, whose size may differ between ranks, in the memory
/// that `allocate` returns.
void AllGatherArray(const Array& x, Allocate allocate);

/// Sends the next `splits[i]` rows to member i of the group, and joins the received rows, in the
/// order of ranks, in the memory that `allocate` returns.
void AllToAllArray(const Array& x, const std::vector<int64_t>& splits, Allocate allocate);

/// Copies the array of member `root` of the group to `out` on every rank; `out` may be the array's
/// own memory.
void BroadcastArray(const Array& x, int root, void* out);

/// Returns after all ranks of the group have called it; `nothing` has no elements.
void Barrier(const Array& nothing);

}  // namespace onnxpar
