// Collectives on arrays of the caller, without a session. All ranks of the world take part.
//
// Ranks that disagree, on the name too, and ranks that die are errors on all, as for the ops.
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
  std::string name;     // the same on all ranks; may be empty
  std::string details;  // further values that must be the same, as text for messages
  DataType type;
  Shape shape;
  const void* data;
};

/// Returns memory for the joined rows of all ranks; null if there is not enough.
using Allocate = void* (*)(const int64_t* rows);

/// Reduces by sum, max, min, prod or, floats only, mean; `out` may be the array's own memory.
void AllReduceArray(const Array& x, const std::string& op, void* out);

/// Reduces, and gives this rank the rows of its shard; shards are as equal as possible, larger ones
/// first.
void ReduceScatterArray(const Array& x, const std::string& op, void* out);

/// Joins the ranks' rows; each rank may have a different number of rows.
void AllGatherArray(const Array& x, Allocate allocate);

/// Sends `splits[i]` rows to rank i, in that order, and joins what arrives.
void AllToAllArray(const Array& x, const std::vector<int64_t>& splits, Allocate allocate);

/// Copies the root's array to every `out`, which may be the array's own memory.
void BroadcastArray(const Array& x, int root, void* out);

/// Waits until all ranks have called it.
void Barrier(const std::shared_ptr<World>& world, const std::string& name);

}  // namespace onnxpar
