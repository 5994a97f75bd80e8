// The kernels of the custom ops.
#pragma once

#include <memory>
#include <string>

#include "ort.h"
#include "world.h"

namespace onnxpar {

/// A node of a loaded model.
class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Runs the node; throws a std::exception whose message is for the user.
  virtual void Compute(KernelContext& context) = 0;
};

/// The kernel of a node with op type `kind`; throws if its attributes are wrong.
std::unique_ptr<Kernel> MakeKernel(const std::string& kind, const KernelInfo& info,
                                   std::shared_ptr<World> world);

}  // namespace onnxpar
