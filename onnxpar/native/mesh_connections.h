// Makes the TCP connections between all ranks of a world, for one stream.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "handshake.h"
#include "store.h"

namespace onnxpar {

/// The addresses by which a rank listens and connects.
struct Network {
  std::string listening;  // an address or the name of an interface; 0.0.0.0 for all interfaces
  Address hub;            // by which this rank reaches the hub
  Credentials credentials;
};

/// The connections to each rank, by rank: sockets[r][i] is this end of connection number i to rank
/// r, and rank r has the other end under the same number. Empty for this rank itself.
using PeerSockets = std::vector<std::vector<TcpSocket>>;

/// Makes `count` connections to each other rank; all ranks must call it with the same count. Drops
/// connections from processes without the key of the world. Throws std::runtime_error if a rank
/// cannot be reached within `timeout` (the message names both ends), or if the world fails
/// meanwhile.
PeerSockets ConnectPeers(int rank, int size, int count, Store& store, const Network& network,
                         std::chrono::milliseconds timeout);

}  // namespace onnxpar
