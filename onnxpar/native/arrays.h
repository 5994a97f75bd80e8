// Collectives on the caller's arrays, without an onnxruntime session, e.g. for onnxpar.hvd. All
// ranks of the array's group must call the same function.
//
// If ranks disagree, for example on the name or the shape, or if a rank dies, the call throws on
// all ranks, as for the ops.
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

/// The caller's function that allocates the result. `rows[i]` is the number of rows (the size of
/// dimension 0) that come from member i of the group; the result has their sum. Returns null if
/// there is not enough memory.
using Allocate = void* (*)(const int64_t* rows);

/// Writes to `out` on each rank the reduction of all ranks' arrays, of the shape of `x`; `out` may
/// be the memory of `x`. `op` is sum, max, min, prod or, for floats, mean.
void AllReduceArray(const Array& x, const std::string& op, void* out);

/// Reduces the ranks' arrays, divides the result along dimension 0 into one shard per rank, and
/// writes this rank's shard to `out`. Shards are as equal as possible, larger ones first: 5 rows
/// over 2 ranks become 3 and 2.
void ReduceScatterArray(const Array& x, const std::string& op, void* out);

/// Concatenates the ranks' arrays along dimension 0 in the order of ranks, into the memory that
/// `allocate` returns. Only dimension 0 may differ between ranks: [2, 8] and [3, 8] become [5, 8].
void AllGatherArray(const Array& x, Allocate allocate);

/// Sends consecutive rows of `x` to the members of the group: the first splits[0] rows to member 0,
/// the next splits[1] to member 1, and so on. Concatenates the rows that this rank receives, in the
/// order of their senders, in the memory that `allocate` returns.
void AllToAllArray(const Array& x, const std::vector<int64_t>& splits, Allocate allocate);

/// Writes to `out` on every rank the array of the member with index `root` of the group; `out` may
/// be the memory of `x`. The arrays of all ranks have the same shape.
void BroadcastArray(const Array& x, int root, void* out);

/// Returns after all ranks of the group have called Barrier. `nothing` names the world, the group
/// and the barrier; it has no elements.
void Barrier(const Array& nothing);

}  // namespace onnxpar
