// The collectives, built from messages through shared memory or Gloo.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "mesh_connections.h"
#include "transport.h"

namespace onnxpar {

/// An AllReduce that sends at most this many bytes takes one step, in which every member sends its
/// whole operand to every other one, instead of two steps.
constexpr size_t kDirectBytes = 384 * 1024;
/// In a Broadcast of more bytes, the root sends a part to each member, and the members exchange the
/// parts.
constexpr size_t kScatteredBytes = 64 * 1024;

/// True if an AllReduce of this many bytes takes one step.
bool IsDirect(const Call& call, size_t bytes);
/// True if the root of a Broadcast of this many bytes sends each member a part.
bool IsDealt(const Call& call, size_t bytes);

/// Connects to the other ranks, which it finds through `store`, by the media that ONNXPAR_TRANSPORT
/// allows (links.h). A collective throws if one of its messages does not
/// arrive within `timeout`.
std::unique_ptr<Transport> ConnectRanks(int rank, int size, Store& store, const Network& network,
                                        std::chrono::milliseconds timeout);

}  // namespace onnxpar
