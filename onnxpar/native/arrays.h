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

/// What one rank gives to a collective.
struct Array {
  std::shared_ptr<World> world;
  std::string name;     // the same on all ranks; may be empty
  std::string details;  // what else must be the same, for messages
  DataType type;
  Shape shape;
  const void* data;
};

/// Returns memory for the rows that each rank gives, joined; null where there is none.
using Allocate = void* (*)(const int64_t* rows);

/// Reduces by sum, max, min, prod or, floats only, mean; `out` may be the array's own memory.
void AllReduceArray(const Array& x, const std::string& op, void* out);

/// Reduces, and leaves this rank the rows of its part: as equal as can be, the larger ones first.
void ReduceScatterArray(const Array& x, const std::string& op, void* out);

/// Joins the ranks' rows, of which each may have a number of its own.
void AllGatherArray(const Array& x, Allocate allocate);

/// Sends `splits[i]` rows to rank i, in that order, and joins what arrives.
void AllToAllArray(const Array& x, const std::vector<int64_t>& splits, Allocate allocate);

/// Copies the root's array to every `out`, which may be the array's own memory.
void BroadcastArray(const Array& x, int root, void* out);

/// Returns when all ranks have called it.
void Barrier(const std::shared_ptr<World>& world, const std::string& name);

}  // namespace onnxpar
