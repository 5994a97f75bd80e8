#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "this_cpu.h"

// Loops have no dependencies between elements, although a result may be in the memory of an
// operand; compilers cannot know this.
#if defined(__clang__)
#define ONNXPAR_EACH_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define ONNXPAR_EACH_APART _Pragma("GCC ivdep")
#endif

namespace onnxpar {
namespace {

/// The number of elements for which all steps run before the next elements, so that the
/// intermediate values stay in the first-level cache.
constexpr size_t kBlock = 1024;

/// An operand of a step, for one block: its elements, or if `elements` is null, one value for all.
struct Source {
  const float* elements;
  float value;
};

using Loop = void (*)(const Source* operands, float* out, size_t count);

struct Add {
  float operator()(float a, float b) const { return a + b; }
};
struct Sub {
  float operator()(float a, float b) const { return a - b; }
};
struct Mul {
  float operator()(float a, float b) const { return a * b; }
};
struct Div {
  float operator()(float a, float b) const { return a / b; }
};
struct Sqrt {
  float operator()(float a) const { return std::sqrt(a); }
};
struct Neg {
  float operator()(float a) const { return -a; }
};
struct Abs {
  float operator()(float a) const { return std::fabs(a); }
};

template <typename Operation>
ONNXPAR_INLINE void BinaryLoop(const Source* operands, float* out, size_t count) {
  const Operation operation;
  const float *a = operands[0].elements, *b = operands[1].elements;
  if (a == nullptr) {
    const float value = operands[0].value;
    ONNXPAR_EACH_APART
    for (size_t i = 0; i < count; ++i) out[i] = operation(value, b[i]);
  } else if (b == nullptr) {
    const float value = operands[1].value;
    ONNXPAR_EACH_APART
    for (size_t i = 0; i < count; ++i) out[i] = operation(a[i], value);
  } else {
    ONNXPAR_EACH_APART
    for (size_t i = 0; i < count; ++i) out[i] = operation(a[i], b[i]);
  }
}

template <typename Operation>
ONNXPAR_INLINE void UnaryLoop(const Source* operands, float* out, size_t count) {
  const Operation operation;
  const float* a = operands[0].elements;
  ONNXPAR_EACH_APART
  for (size_t i = 0; i < count; ++i) out[i] = operation(a[i]);
}

// All versions of a loop give the same bits.
template <typename Operation>
void Binary(const Source* operands, float* out, size_t count) {
  OnThisCpu([=] { BinaryLoop<Operation>(operands, out, count); });
}

template <typename Operation>
void Unary(const Source* operands, float* out, size_t count) {
  OnThisCpu([=] { UnaryLoop<Operation>(operands, out, count); });
}

void Identity(const Source* operands, float* out, size_t count) {
  if (operands[0].elements != out) std::memcpy(out, operands[0].elements, count * sizeof(float));
}

}  // namespace

struct ElementwiseProgram::Operation {
  const char* name;
  size_t operands;
  Loop loop;
};

const ElementwiseProgram::Operation ElementwiseProgram::kOperations[] = {
    {"Add", 2, Binary<Add>}, {"Sub", 2, Binary<Sub>},   {"Mul", 2, Binary<Mul>},
    {"Div", 2, Binary<Div>}, {"Sqrt", 1, Unary<Sqrt>},  {"Neg", 1, Unary<Neg>},
    {"Abs", 1, Unary<Abs>},  {"Identity", 1, Identity},
};

ElementwiseProgram::ElementwiseProgram(const std::string& text, const std::vector<int64_t>& results)
    : results_(results.size()) {
  std::istringstream lines(text);
  for (std::string step; std::getline(lines, step, ';');) Append(step);
  if (tensors_ == 0) throw std::runtime_error("program '" + text + "' reads no tensor; x0 is one");
  for (int64_t step : results) {
    if (step < 0 || step >= static_cast<int64_t>(steps_.size())) {
      throw std::runtime_error("results has " + std::to_string(step) + ", but the program has " +
                               std::to_string(steps_.size()) + " steps, numbered from 0");
    }
  }
  Place(results);
}

void ElementwiseProgram::Append(const std::string& step) {
  std::istringstream words(step);
  std::string name, word;
  words >> name;
  const auto* const operation =
      std::find_if(std::begin(kOperations), std::end(kOperations),
                   [&](const Operation& each) { return name == each.name; });
  if (operation == std::end(kOperations)) {
    throw std::runtime_error("step '" + step + "' of the program: '" + name +
                             "' is no operation; use Add, Sub, Mul, Div, Sqrt, Neg, Abs or " +
                             "Identity");
  }
  std::vector<Operand> operands;
  while (words >> word) operands.push_back(Parse(word));
  if (operands.size() != operation->operands) {
    throw std::runtime_error("step '" + step + "' of the program: " + name + " has " +
                             std::to_string(operation->operands) + " operands, not " +
                             std::to_string(operands.size()));
  }
  const bool constant = std::all_of(operands.begin(), operands.end(),
                                    [](const Operand& x) { return x.kind == Kind::kScalar; });
  if (constant) throw std::runtime_error("step '" + step + "' of the program reads only scalars");
  steps_.push_back({operation, operands, 0, {}});
}

ElementwiseProgram::Operand ElementwiseProgram::Parse(const std::string& name) {
  const std::string digits = name.substr(1);
  const bool number = !digits.empty() && digits.size() < 6 &&
                      digits.find_first_not_of("0123456789") == std::string::npos;
  const size_t index = number ? std::stoul(digits) : 0;
  if (number && name[0] == 'x') {
    tensors_ = std::max(tensors_, index + 1);
    return {Kind::kTensor, index};
  }
  if (number && name[0] == 's') {
    scalars_ = std::max(scalars_, index + 1);
    return {Kind::kScalar, index};
  }
  if (number && name[0] == 'v' && index < steps_.size()) return {Kind::kStep, index};
  throw std::runtime_error("operand '" + name + "' in step " + std::to_string(steps_.size()) +
                           " of the program: use x0 for a tensor, s0 for a scalar, or v0 for the " +
                           "value of an earlier step");
}

/// Decides where each step writes its values. A step gets a register (a block of memory), which is
/// reused after the last step that reads it. A step whose value is a result writes to the result's
/// tensor directly. If a later step still reads a tensor, which may be in the same memory, the
/// result is copied at the end of the block instead.
void ElementwiseProgram::Place(const std::vector<int64_t>& results) {
  std::vector<size_t> last(steps_.size());
  size_t reads = 0;  // no later step reads a tensor
  for (size_t i = 0; i < steps_.size(); ++i) {
    last[i] = i;
    for (const Operand& operand : steps_[i].operands) {
      if (operand.kind == Kind::kStep) last[operand.index] = i;
      if (operand.kind == Kind::kTensor) reads = i;
    }
  }
  constexpr size_t kNone = static_cast<size_t>(-1);
  std::vector<size_t> direct(steps_.size(), kNone);
  for (size_t j = 0; j < results.size(); ++j) {
    const size_t i = static_cast<size_t>(results[j]);
    if (i >= reads && direct[i] == kNone) {
      direct[i] = j;
    } else {
      steps_[i].copies.push_back(j);
      last[i] = steps_.size();
    }
  }
  std::vector<size_t> free;
  for (size_t i = 0; i < steps_.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {  // a step may write where it reads
      if (last[j] == i && direct[j] == kNone) free.push_back(steps_[j].place);
    }
    if (direct[i] != kNone) continue;
    if (free.empty()) free.push_back(registers_++);
    steps_[i].place = free.back();
    free.pop_back();
    if (last[i] == i) free.push_back(steps_[i].place);  // no step reads it any more
  }
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (direct[i] != kNone) steps_[i].place = registers_ + direct[i];
  }
}

void ElementwiseProgram::Run(const float* const* tensors, const float* scalars,
                             float* const* results, size_t begin, size_t end) const {
  const std::unique_ptr<float[]> registers(new float[registers_ * kBlock]);
  for (; begin < end; begin += kBlock) {
    const size_t count = std::min(kBlock, end - begin);
    const auto place = [&](const Step& step) {
      if (step.place < registers_) return registers.get() + step.place * kBlock;
      return results[step.place - registers_] + begin;
    };
    for (const Step& step : steps_) {
      Source operands[2];
      for (size_t i = 0; i < step.operands.size(); ++i) {
        const auto [kind, index] = step.operands[i];
        operands[i] = kind == Kind::kTensor   ? Source{tensors[index] + begin, 0.0f}
                      : kind == Kind::kScalar ? Source{nullptr, scalars[index]}
                                              : Source{place(steps_[index]), 0.0f};
      }
      step.operation->loop(operands, place(step), count);
    }
    for (const Step& step : steps_) {
      for (size_t j : step.copies) {
        std::memcpy(results[j] + begin, place(step), count * sizeof(float));
      }
    }
  }
}

}  // namespace onnxpar
