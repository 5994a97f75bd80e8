// The kernels of attention over caches of keys and values that are divided into pages, of which
// each text (sequence) has a list.
#pragma once

#include <memory>

#include "kernels.h"

namespace onnxpar {

/// Returns the kernel of a PagedAttention node, whose caches have whole pages.
std::unique_ptr<Kernel> MakePagedAttention(const KernelInfo& info);

/// Returns the kernel of a PagedAttentionPart node, whose caches have only some positions of each
/// page; the other positions are on other ranks.
std::unique_ptr<Kernel> MakePagedAttentionPart(const KernelInfo& info);

}  // namespace onnxpar
