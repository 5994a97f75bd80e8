// Simulates a slower network between ranks, to plan for it and to test the overlap of communication
// and compute.
#pragma once

#include <memory>
#include <vector>

#include "transport.h"

namespace onnxpar {

/// The simulated link of one rank, which the transports of all its streams share.
class SlowLink;

/// Returns the link that the environment variable ONNXPAR_LINK describes, e.g.
/// latency=100us,bandwidth=1GB/s,ranks_per_host=4; null without the variable. Throws if it is
/// wrong.
std::shared_ptr<SlowLink> SlowLinkFromEnvironment();

/// Returns the host of each of `size` ranks; empty if `link` is null. Rank r is on host r /
/// ranks_per_host, which is 1 unless given.
std::vector<int> SimulatedHosts(const SlowLink* link, int size);

/// Returns a transport whose collectives also take the time that they would take over `link`;
/// returns `transport` itself if `link` is null.
///
/// A collective first moves its bytes, and then waits for the latency of each round of messages,
/// and for the bytes that this rank sends to or receives from ranks of other hosts. Bytes go over
/// the link in sequence, even those of different streams.
std::unique_ptr<Transport> Slowed(std::unique_ptr<Transport> transport,
                                  std::shared_ptr<SlowLink> link);

}  // namespace onnxpar
