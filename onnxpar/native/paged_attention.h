// The kernel of attention over caches in pages.
#pragma once

#include <memory>

#include "kernels.h"

namespace onnxpar {

/// Creates the kernel of a PagedAttention node.
std::unique_ptr<Kernel> MakePagedAttention(const KernelInfo& info);

}  // namespace onnxpar
