// Because the order does not depend on algorithm and size, results are bit-identical on all
// members, from run to run, and between an AllReduce, the equivalent ReduceScatter + AllGather, and
// any bucket into which it is fused. Where several members share a host, the operands of each host
// are combined first, and then the results of the hosts, in the order of their first members: so
// floats may have other last bits on several hosts than on one host.
#pragma once

#include <cstddef>
#include <string>

#include "ort_abi.h"

namespace onnxpar {

/// kMean is the sum divided by a divisor, for floats only.
enum class ReduceOp { kSum, kMax, kMin, kProd, kMean };

/// Returns the reduction for "sum", "max", "min" or "prod". Throws for another name.
ReduceOp ParseReduceOp(const std::string& name);

struct Reduction {
  DataType type;
  ReduceOp op;
  double divisor = 1;  // of kMean; transports set it
};

/// Computes out[i] = sources[0][i] op sources[1][i] op ...; `out` may be one of the sources.
///
/// float16 and bfloat16 are accumulated in float32 and rounded once; integers wrap on overflow; max
/// and min return NaN if an operand is NaN; for bool, sum and max are a logical or, prod and min a
/// logical and.
void Fold(const Reduction& reduction, const void* const* sources, size_t source_count, void* out,
          size_t elements);

}  // namespace onnxpar
