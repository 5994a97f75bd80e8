// Elementwise reductions, always folded in the order of the group's members.
//
// One order for every algorithm and size makes results bit-identical on all members, from run to
// run, and between an AllReduce, its ReduceScatter + AllGather, and any bucket that it is fused
// into.
#pragma once

#include <cstddef>
#include <string>

#include "ort_abi.h"

namespace onnxpar {

/// kMean is a sum divided by the number of members, of floats only.
enum class ReduceOp { kSum, kMax, kMin, kProd, kMean };

/// Reads "sum", "max", "min" or "prod".
ReduceOp ParseReduceOp(const std::string& name);

struct Reduction {
  DataType type;
  ReduceOp op;
};

/// out[i] = sources[0][i] op sources[1][i] op ...; `out` may be one of the sources.
///
/// float16 and bfloat16 are accumulated in float32 and rounded once; integer sums wrap; NaN wins in
/// max and min; on bool, sum and max are or, prod and min are and.
void Fold(const Reduction& reduction, const void* const* sources, size_t source_count, void* out,
          size_t elements);

}  // namespace onnxpar
