// The arithmetic of reductions. The order of operands depends neither on the algorithm nor on the
// size. So results have the same bits on all members, from run to run, and whether a tensor is
// reduced by an AllReduce, by a ReduceScatter and an AllGather, or fused with others in a bucket.
//
// Where several members share a host, the operands of each host are combined first, and then the
// hosts' results in the order of the hosts' first members. So the last bits of floats may differ
// between several hosts and one host.
#pragma once

#include <cstddef>
#include <string>

#include "ort_abi.h"

namespace onnxpar {

/// kMean, for floats only, is the sum divided by Reduction::divisor.
enum class ReduceOp { kSum, kMax, kMin, kProd, kMean };

/// Returns the operation that an attribute names: "sum", "max", "min" or "prod". Throws for another
/// name.
ReduceOp ParseReduceOp(const std::string& name);

struct Reduction {
  DataType type;
  ReduceOp op;
  double divisor = 1;  // of kMean; transports set it
};

/// Computes out[i] = sources[0][i] op sources[1][i] op ... for `elements` elements of
/// `source_count` arrays, from left to right. `out` may be one of the sources.
///
/// float16 and bfloat16 are accumulated in float32 and rounded once. Integers wrap on overflow. max
/// and min return NaN if an operand is NaN. For bool, sum and max are a logical or; prod and min,
/// and.
void Fold(const Reduction& reduction, const void* const* sources, size_t source_count, void* out,
          size_t elements);

}  // namespace onnxpar
