// The collectives, built from messages through shared memory or Gloo.
#pragma once

#include <gloo/rendezvous/store.h>

#include <chrono>
#include <memory>
#include <string>

#include "transport.h"

namespace onnxpar {

/// Connects to the other ranks, which it finds through `store`, by the media that ONNXPAR_TRANSPORT
/// allows (links.h); Gloo listens on `address`. A collective throws if one of its messages does not
/// arrive within `timeout`.
std::unique_ptr<Transport> ConnectRanks(int rank, int size, gloo::rendezvous::Store& store,
                                        const std::string& address,
                                        std::chrono::milliseconds timeout);

}  // namespace onnxpar
