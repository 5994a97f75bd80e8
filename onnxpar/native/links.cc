#include "links.h"

#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace onnxpar {

Medium MediumFromEnvironment() {
  const char* const value = std::getenv("ONNXPAR_TRANSPORT");
  const std::string name = value == nullptr ? "" : value;
  if (name.empty() || name == "auto") return Medium::kAuto;
  if (name == "gloo") return Medium::kGloo;
  if (name == "shared-memory") return Medium::kSharedMemory;
  throw std::runtime_error("ONNXPAR_TRANSPORT='" + name + "' must be auto, gloo or shared-memory");
}

/// Gloo is needed if one pair of ranks has no shared memory. It then connects all ranks, because it
/// can only connect a whole world.
Links::Links(int rank, int size, Store& store, const Network& network,
             std::chrono::milliseconds timeout, Medium medium, std::vector<int> simulated)
    : shared(rank, size, store, medium != Medium::kGloo, timeout),
      rank(rank),
      hosts(simulated.empty() ? shared.hosts() : std::move(simulated)) {
  if (shared.everyone()) return;
  if (medium == Medium::kSharedMemory) {
    throw std::runtime_error("ONNXPAR_TRANSPORT=shared-memory, but not all ranks are on one host");
  }
  gloo = std::make_unique<GlooMesh>(rank, size, store, network, timeout);
}

int Links::Awaited() const {
  const int elsewhere = gloo ? gloo->awaited() : -1;
  return elsewhere < 0 ? shared.awaited() : elsewhere;
}

void Links::Abort() {
  shared.Abort();
  if (gloo) gloo->Abort();
}

}  // namespace onnxpar
