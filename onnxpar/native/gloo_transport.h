// The collectives over Gloo's TCP connections.
#pragma once

#include <gloo/rendezvous/store.h>

#include <chrono>
#include <memory>
#include <string>

#include "transport.h"

namespace onnxpar {

/// Connects `rank` to all other ranks through addresses exchanged in `store`; listens on `address`.
/// A message that has not arrived `timeout` after it was posted makes its collective throw.
std::unique_ptr<Transport> ConnectGloo(int rank, int size, gloo::rendezvous::Store& store,
                                       const std::string& address,
                                       std::chrono::milliseconds timeout);

}  // namespace onnxpar
