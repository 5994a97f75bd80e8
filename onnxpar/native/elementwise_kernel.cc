#include "elementwise_kernel.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "elementwise.h"

namespace onnxpar {
namespace {

/// The number of elements that one thread computes before it takes the next ones.
constexpr size_t kGrain = 16384;

class FusedElementwise : public Kernel {
 public:
  explicit FusedElementwise(const KernelInfo& info)
      : program_(info.String("program", ""), info.Ints("results")) {}

  void Compute(KernelContext& context) override {
    const size_t inputs = program_.tensors() + program_.scalars();
    if (!context.Has(inputs - 1) || context.Has(inputs) ||
        context.OutputCount() != program_.results()) {
      throw std::runtime_error("FusedElementwise: the program has " +
                               std::to_string(program_.tensors()) + " tensors, " +
                               std::to_string(program_.scalars()) + " scalars and " +
                               std::to_string(program_.results()) +
                               " results, but the node has other numbers of inputs or outputs");
    }
    const Shape shape = context.Input(0).shape;
    std::vector<const float*> tensors;
    std::vector<float> scalars;
    for (size_t i = 0; i < inputs; ++i) {
      const Tensor x = context.Input(i);
      const auto* const data = static_cast<const float*>(x.data);
      if (i < program_.tensors() && x.shape == shape) {
        tensors.push_back(data);
      } else if (i >= program_.tensors() && x.Elements() == 1) {
        scalars.push_back(*data);
      } else {
        throw std::runtime_error("FusedElementwise: input " + std::to_string(i) + " has shape " +
                                 ToText(x.shape) + "; it must have " +
                                 (i < program_.tensors() ? "that of input 0, " + ToText(shape)
                                                         : std::string("one element")));
      }
    }
    const size_t elements = context.Input(0).Elements();
    std::vector<float*> results;
    for (size_t i = 0; i < program_.results(); ++i) {
      results.push_back(static_cast<float*>(context.Output(i, shape)));
    }
    context.ParallelFor((elements + kGrain - 1) / kGrain, [&](size_t part) {
      program_.Run(tensors.data(), scalars.data(), results.data(), part * kGrain,
                   std::min((part + 1) * kGrain, elements));
    });
  }

 private:
  const ElementwiseProgram program_;
};

}  // namespace

std::unique_ptr<Kernel> MakeFusedElementwise(const KernelInfo& info) {
  return std::make_unique<FusedElementwise>(info);
}

}  // namespace onnxpar
