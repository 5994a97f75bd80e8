// The kernels of the ops by which ranks send messages to particular other ranks: Send, Recv,
// CollectivePermute, NeighborExchange and HaloExchange.
#pragma once

#include <memory>
#include <string>

#include "kernels.h"

namespace onnxpar {

/// Returns a new kernel for a node of op type `kind`; null if this is none of these ops. Throws if
/// the node's attributes are invalid.
std::unique_ptr<Kernel> MakeMessageKernel(const std::string& kind, const KernelInfo& info,
                                          std::shared_ptr<World> world);

}  // namespace onnxpar
