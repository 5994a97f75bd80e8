// The connections of one rank to all other ranks of its world: shared memory inside a host, Gloo
// between hosts.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "gloo_mesh.h"
#include "shared_mesh.h"
#include "transport.h"

namespace onnxpar {

/// How ranks exchange messages.
enum class Medium {
  kAuto,          // shared memory where two ranks reach each other by it, else Gloo
  kGloo,          // Gloo alone
  kSharedMemory,  // shared memory alone; an error if ranks are on several hosts
};

/// Returns the value of ONNXPAR_TRANSPORT: auto, gloo or shared-memory; auto if it is not set.
/// Throws for another value.
Medium MediumFromEnvironment();

struct Links {
  /// Connects to all ranks of the world, whose addresses are in `store`. `simulated` has the host
  /// of each rank in a simulation, else it is empty. Throws if a rank cannot be reached within
  /// `timeout`.
  Links(int rank, int size, Store& store, const Network& network, std::chrono::milliseconds timeout,
        Medium medium, std::vector<int> simulated);

  /// True if rank `other` is on this rank's host.
  bool IsHere(int other) const { return hosts[other] == hosts[rank]; }

  void Abort();

  /// Returns the rank whose message this rank waits for, or was waiting for when it failed; -1 if
  /// none.
  int Awaited() const;

  SharedMesh shared;
  std::unique_ptr<GlooMesh> gloo;  // null if shared memory reaches all ranks
  const int rank;
  const std::vector<int> hosts;  // by rank
  Crossing crossing;             // of the collective that runs
};

}  // namespace onnxpar
