// The kernel of attention over caches in pages.
#pragma once

#include <memory>

#include "kernels.h"

namespace onnxpar {

/// Creates the kernel of a PagedAttention node.
std::unique_ptr<Kernel> MakePagedAttention(const KernelInfo& info);

/// Creates the kernel of a PagedAttentionPart node, which attends to some positions of each page.
std::unique_ptr<Kernel> MakePagedAttentionPart(const KernelInfo& info);

}  // namespace onnxpar
