// The collectives over Gloo's TCP connections.
#pragma once

#include <gloo/rendezvous/store.h>

#include <chrono>
#include <memory>
#include <string>

#include "transport.h"

namespace onnxpar {

/// Listens on `address`, exchanges addresses with the other ranks through `store`, and connects to
/// them; returns the transport. A collective throws if one of its messages does not arrive within
/// `timeout`.
std::unique_ptr<Transport> ConnectGloo(int rank, int size, gloo::rendezvous::Store& store,
                                       const std::string& address,
                                       std::chrono::milliseconds timeout);

}  // namespace onnxpar
