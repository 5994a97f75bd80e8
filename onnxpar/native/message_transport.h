// The collectives, made of messages between two ranks through shared memory or Gloo.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "mesh_connections.h"
#include "transport.h"

namespace onnxpar {

/// Connects to the other ranks, whose addresses are in `store`, by the media that ONNXPAR_TRANSPORT
/// allows (links.h), and returns the transport over these connections. `simulated` has the host of
/// each rank in a simulation, else it is empty. A collective throws if one of its messages does not
/// arrive within `timeout`.
std::unique_ptr<Transport> ConnectRanks(int rank, int size, Store& store, const Network& network,
                                        std::chrono::milliseconds timeout,
                                        const std::vector<int>& simulated);

}  // namespace onnxpar
