// The kernels of the custom ops.
#pragma once

#include <memory>
#include <string>

#include "ort.h"
#include "world.h"

namespace onnxpar {

/// The kernel of one node in a loaded model.
class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Runs the node. Throws a std::exception with a message for the user.
  virtual void Compute(KernelContext& context) = 0;
};

/// Creates the kernel of a node with op type `kind`. Throws if its attributes are wrong.
std::unique_ptr<Kernel> MakeKernel(const std::string& kind, const KernelInfo& info,
                                   std::shared_ptr<World> world);

}  // namespace onnxpar
