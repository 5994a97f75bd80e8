// The kernel of the op FusedElementwise.
#pragma once

#include <memory>

#include "kernels.h"

namespace onnxpar {

/// Creates the kernel. Throws if the node's attributes are wrong.
std::unique_ptr<Kernel> MakeFusedElementwise(const KernelInfo& info);

}  // namespace onnxpar
