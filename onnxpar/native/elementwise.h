// Programs of elementwise operations on float32 tensors, which run in one loop over the elements
// instead of one loop per operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace onnxpar {

/// A straight-line program. Its steps are separated by ";"; a step is an operation with its
/// operands: `x0` is the element of tensor 0, `s0` is scalar 0, and `v0` the value of step 0. For
/// example, "Mul x0 s0; Sub x1 v0" computes x1[i] - x0[i] * s0 for each i.
///
/// Each operation rounds to float32 exactly, so results have the same bits as separate loops would
/// give.
class ElementwiseProgram {
 public:
  /// `results[j]` is the number of the step whose value is result j. Throws if the text is not a
  /// valid program.
  ElementwiseProgram(const std::string& text, const std::vector<int64_t>& results);

  /// The numbers of tensors and of scalars that the program reads, and of results that it computes.
  size_t tensors() const { return tensors_; }
  size_t scalars() const { return scalars_; }
  size_t results() const { return results_; }

  /// Computes the elements `begin` to `end` - 1 of all results. A result may have the memory of a
  /// tensor.
  void Run(const float* const* tensors, const float* scalars, float* const* results, size_t begin,
           size_t end) const;

 private:
  enum class Kind { kTensor, kScalar, kStep };
  struct Operand {
    Kind kind;
    size_t index;
  };
  struct Operation;
  struct Step {
    const Operation* operation;
    std::vector<Operand> operands;
    size_t place;                // a register; from registers_ on, a result
    std::vector<size_t> copies;  // results that get the value at the end of a block
  };
  static const Operation kOperations[];

  void Append(const std::string& step);
  Operand Parse(const std::string& name);
  void Place(const std::vector<int64_t>& results);

  std::vector<Step> steps_;
  size_t tensors_ = 0;
  size_t scalars_ = 0;
  size_t results_ = 0;
  size_t registers_ = 0;
};

}  // namespace onnxpar
