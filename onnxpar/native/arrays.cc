#include "arrays.h"

#include <cstring>
#include <stdexcept>

#include "axis.h"
#include "hash.h"

namespace onnxpar {
namespace {

using Counts = std::vector<int64_t>;

/// Runs body(transport, call) as a collective of the group of `x`. Ranks exchange messages only if
/// they agree on `kind`, the name, `details` (the other parameters, as text), the type, and
/// `common`, the part of the shape that must be the same on all ranks. A failure on one rank throws
/// on all.
template <typename Body>
void RunOn(const Array& x, const char* kind, std::string details, const Shape& common,
           const Body& body) {
  const std::string name = kind + (x.name.empty() ? "" : " '" + x.name + "'");
  if (!x.details.empty()) details += (details.empty() ? "" : ", ") + x.details;
  try {
    ElementSize(x.type);  // throws for types that cannot be sent
    uint64_t signature = Mix(Mix(Mix(0, std::string("array")), name), details);
    signature = Mix(Mix(signature, static_cast<uint64_t>(x.type)), common);
    Group& group = x.world->GroupOf(x.ranks);
    x.world->Run({name, details, group, signature, x.type, x.shape, nullptr, nullptr}, body);
  } catch (const WorldFailure&) {
    throw;
  } catch (const std::exception& error) {
    x.world->Reject(name, error.what());
  }
}

size_t Bytes(const Array& x) { return Tensor{x.type, x.shape, nullptr}.Bytes(); }

void Copy(const Array& x, void* out) {
  if (x.data != out && Bytes(x) > 0) std::memcpy(out, x.data, Bytes(x));
}

bool Alone(const Array& x) { return x.GroupSize() == 1; }

Reduction ReductionOf(const Array& x, const std::string& op) {
  if (op != "mean") return {x.type, ParseReduceOp(op)};
  for (const DataType type :
       {DataType::kFloat, DataType::kDouble, DataType::kFloat16, DataType::kBfloat16}) {
    if (x.type == type) return {x.type, ReduceOp::kMean};
  }
  throw std::runtime_error(std::string("cannot average elements of type ") + TypeName(x.type) +
                           "; use sum, or cast to a float type first");
}

/// Tells each member i that this rank will send it `gives[i]` rows. Returns the number of rows that
/// each member will send to this rank.
Counts ExchangeCounts(Transport& transport, const Call& call, const Counts& gives) {
  Counts takes(gives.size());
  std::vector<Block> blocks;
  for (int member = 0; member < call.size(); ++member) {
    blocks.push_back(Run(member, sizeof(int64_t), member * sizeof(int64_t)));
  }
  const Call counting{call.ranks, call.me, Mix(call.key, std::string("counts"))};
  transport.Exchange(counting, gives.data(), blocks, takes.data(), blocks);
  return takes;
}

void* Allocated(Allocate allocate, const Counts& rows) {
  SumOf(rows);  // throws unless the other ranks sent valid sizes
  void* const memory = allocate(rows.data());
  if (memory == nullptr) throw std::runtime_error("not enough memory for the result");
  return memory;
}

/// Returns the places, in an array of sum(rows) rows like those of `x`, of consecutive blocks: the
/// first `rows[0]` rows belong to member 0, the next `rows[1]` to member 1, and so on.
std::vector<Block> RowsOf(const Array& x, const Counts& rows) {
  return SlicesOf(WithExtent(x.shape, 0, SumOf(rows)), 0, ElementSize(x.type), rows);
}

}  // namespace

void AllReduceArray(const Array& x, const std::string& op, void* out) {
  if (Alone(x)) return Copy(x, out);
  RunOn(x, "AllReduce", "op=" + op, x.shape, [&](Transport& transport, const Call& call) {
    const size_t elements = Bytes(x) / ElementSize(x.type);
    transport.AllReduce(call, ReductionOf(x, op), x.data, out, elements);
  });
}

void ReduceScatterArray(const Array& x, const std::string& op, void* out) {
  if (Alone(x)) return Copy(x, out);
  RunOn(x, "ReduceScatter", "op=" + op, x.shape, [&](Transport& transport, const Call& call) {
    Counts rows;
    for (size_t member = 0; member < call.ranks.size(); ++member) {
      rows.push_back(PartOf(x.shape[0], call.ranks.size(), member).size);
    }
    transport.ReduceScatter(call, ReductionOf(x, op), x.data, RowsOf(x, rows), out);
  });
}

void AllGatherArray(const Array& x, Allocate allocate) {
  if (Alone(x)) return Copy(x, Allocated(allocate, {x.shape[0]}));
  const Shape common = WithoutAxis(x.shape, 0);
  RunOn(x, "AllGather", "", common, [&](Transport& transport, const Call& call) {
    const Counts rows = ExchangeCounts(transport, call, Counts(call.ranks.size(), x.shape[0]));
    void* const out = Allocated(allocate, rows);
    transport.AllGather(call, x.data, out, RowsOf(x, rows));
  });
}

void AllToAllArray(const Array& x, const std::vector<int64_t>& splits, Allocate allocate) {
  if (Alone(x)) return Copy(x, Allocated(allocate, splits));
  const Shape common = WithoutAxis(x.shape, 0);
  RunOn(x, "AllToAll", "", common, [&](Transport& transport, const Call& call) {
    const Counts rows = ExchangeCounts(transport, call, splits);
    void* const out = Allocated(allocate, rows);
    transport.Exchange(call, x.data, RowsOf(x, splits), out, RowsOf(x, rows));
  });
}

void BroadcastArray(const Array& x, int root, void* out) {
  if (Alone(x)) return Copy(x, out);
  const std::string details = "root=" + std::to_string(root);
  RunOn(x, "Broadcast", details, x.shape, [&](Transport& transport, const Call& call) {
    if (call.me == root) Copy(x, out);
    transport.Broadcast(call, root, out, Bytes(x));
  });
}

void Barrier(const Array& nothing) {
  if (Alone(nothing)) return;
  RunOn(nothing, "Barrier", "", nothing.shape, [&](Transport& transport, const Call& call) {
    transport.AllGather(call, nullptr, nullptr, RowsOf(nothing, Counts(call.ranks.size())));
  });
}

}  // namespace onnxpar
