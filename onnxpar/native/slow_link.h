// Simulates a slower network between ranks, to plan for one and to test what hides communication.
#pragma once

#include <memory>

#include "transport.h"

namespace onnxpar {

/// Returns a transport whose collectives take longer, as the environment variable ONNXPAR_LINK
/// says, e.g. latency=100us,bandwidth=1GB/s,ranks_per_host=4; without it, the given one. Throws if
/// the variable is wrong.
///
/// A collective first moves its bytes, and then waits for the latency of each round of messages,
/// and for the bytes that this rank sends to or receives from ranks of other hosts. Hosts are
/// simulated, too: rank r is on host r / ranks_per_host, which is 1 unless given.
std::unique_ptr<Transport> SlowedByEnvironment(std::unique_ptr<Transport> transport);

}  // namespace onnxpar
