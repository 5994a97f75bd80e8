// Makes the TCP connections between all ranks of a world, or of one of its streams.
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

/// Connections by rank, and for each rank in an order that both ends share; none for this rank
/// itself.
using PeerSockets = std::vector<std::vector<TcpSocket>>;

/// Makes `count` connections to each other rank; all ranks must call it. Drops connections from
/// processes without the key of the world. Throws std::runtime_error, which names both ends, if a
/// rank cannot be reached within `timeout`, and with the reason if the world fails meanwhile.
PeerSockets ConnectPeers(int rank, int size, int count, Store& store, const Network& network,
                         std::chrono::milliseconds timeout);

}  // namespace onnxpar
