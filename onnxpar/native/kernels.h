// The kernels of the custom ops.
#pragma once

#include <memory>
#include <string>

#include "ort.h"
#include "world.h"

namespace onnxpar {

/// The implementation of one node of a loaded model.
class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Runs the node once: reads the inputs of `context`, and writes its outputs. Throws a
  /// std::exception with a message for the user.
  virtual void Compute(KernelContext& context) = 0;
};

/// Returns a new kernel for a node of op type `kind`, e.g. "AllReduce". Throws if its attributes
/// are invalid.
std::unique_ptr<Kernel> MakeKernel(const std::string& kind, const KernelInfo& info,
                                   std::shared_ptr<World> world);

}  // namespace onnxpar
