// The kernels of ops in which ranks send messages to particular other ranks.
#pragma once

#include <memory>
#include <string>

#include "kernels.h"

namespace onnxpar {

/// Creates the kernel of a node with op type `kind`; null if its op is no such op. Throws if its
/// attributes are wrong.
std::unique_ptr<Kernel> MakeMessageKernel(const std::string& kind, const KernelInfo& info,
                                          std::shared_ptr<World> world);

}  // namespace onnxpar
