// Simulates a slower network between ranks, to plan for one, and to test the overlap of
// communication and computation.
#pragma once

#include <memory>
#include <vector>

#include "transport.h"

namespace onnxpar {

/// The simulated network link of one rank; the transports of all its streams share it.
class SlowLink;

/// Returns the link that the variable ONNXPAR_LINK describes, e.g.
/// latency=100us,bandwidth=1GB/s,ranks_per_host=4; null if it is not set. Throws if its text is
/// invalid.
std::shared_ptr<SlowLink> SlowLinkFromEnvironment();

/// Returns the simulated host of each of `size` ranks: rank r is on host r / ranks_per_host, which
/// is 1 by default. Returns an empty list if `link` is null.
std::vector<int> SimulatedHosts(const SlowLink* link, int size);

/// Returns a transport that does the same as `transport`, but whose collectives take the time that
/// they would take over `link`; `transport` itself if `link` is null.
///
/// A collective first moves its bytes at full speed. Then it waits for the latency of each round of
/// messages, and for the time that the bytes between this rank and ranks of other hosts need. Bytes
/// go over the link one after the other, even those of different streams.
std::unique_ptr<Transport> Slowed(std::unique_ptr<Transport> transport,
                                  std::shared_ptr<SlowLink> link);

}  // namespace onnxpar
