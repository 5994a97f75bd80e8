// Registers the custom ops with onnxruntime: names, inputs, outputs, kernels.
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "environment.h"
#include "kernels.h"
#include "ort.h"
#include "shape_inference.h"
#include "world.h"

namespace onnxpar {
namespace {

/// The signature of an op. There are three kinds of ops.
///
/// Ops that communicate: the last required input and the last output are tokens, empty tensors that
/// order nodes. With `has_sizes`, an optional input follows, the sizes of shards. An op without
/// inputs has no token.
///
/// Variadic ops: any number of inputs and outputs of type `fixed_type`, no tokens.
///
/// Ops with `operands`: compute without a world, no tokens. `operands` has a letter for each input,
/// and `results` for each output: I is int64, F float32, T `fixed_type`, C `cache_type`. A
/// lower-case letter is an optional input.
struct Schema {
  const char* name;
  size_t inputs;  // required ones
  size_t outputs;
  DataType fixed_type;  // type of output 0 of an op without inputs, and of a variadic op
  InferShapes infer;
  bool in_place;  // output 0 may overwrite input 0
  bool has_sizes = false;
  bool variadic = false;
  const char* operands = nullptr;
  const char* results = nullptr;
  DataType cache_type = DataType::kAny;
};

/// The onnxruntime 1.x from which on the ops with `operands` are offered: earlier ones crash if an
/// op that exists for several types lacks an optional input.
constexpr int kSinceMinor = 24;

/// The execution provider of all kernels, in whose memory their tensors are (`HOST` in
/// runtime/session/device.py). onnxruntime copies tensors of nodes on other providers.
constexpr const char* kProvider = "CPUExecutionProvider";

/// The schema of PagedAttention for queries of type `type` and caches of type `cache`.
constexpr Schema PagedAttention(DataType type, DataType cache) {
  Schema schema{"PagedAttention", 11, 3, type, InferPagedAttention, false};
  schema.operands = "TttCCIIIttt";
  schema.results = "TCC";
  schema.cache_type = cache;
  return schema;
}

/// The schema of PagedAttentionPart, whose caches have only some positions of each page.
constexpr Schema PagedAttentionPart(DataType type, DataType cache) {
  Schema schema{"PagedAttentionPart", 12, 4, type, InferPagedAttentionPart, false};
  schema.operands = "TttCCIIItttI";
  schema.results = "FCCF";
  schema.cache_type = cache;
  return schema;
}

const Schema kSchemas[] = {
    {"AllReduce", 2, 2, DataType::kAny, InferSameShape, true},
    {"AllGather", 2, 2, DataType::kAny, InferAllGather, false},
    {"ReduceScatter", 2, 2, DataType::kAny, InferReduceScatter, false, true},
    {"AllToAll", 2, 2, DataType::kAny, InferAllToAll, false, true},
    {"AllToAllV", 4, 2, DataType::kAny, InferAllToAllV, false},
    {"Broadcast", 2, 2, DataType::kAny, InferSameShape, true},
    {"Send", 2, 1, DataType::kAny, InferTokenOnly, false},
    {"Recv", 2, 2, DataType::kAny, InferSameShape, false},
    {"CollectivePermute", 2, 2, DataType::kAny, InferCollectivePermute, false},
    {"NeighborExchange", 2, 2, DataType::kAny, InferNeighborExchange, false},
    {"HaloExchange", 3, 2, DataType::kAny, InferOpenAxis, false},
    {"StartAllReduce", 2, 2, DataType::kAny, InferStart<InferSameShape>, false},
    {"StartAllGather", 2, 2, DataType::kAny, InferStart<InferAllGather>, false},
    {"StartReduceScatter", 2, 2, DataType::kAny, InferStart<InferReduceScatter>, false, true},
    {"StartAllToAll", 2, 2, DataType::kAny, InferStart<InferAllToAll>, false, true},
    {"StartAllToAllV", 4, 2, DataType::kAny, InferStart<InferOpenAxis>, false},
    {"Complete", 2, 2, DataType::kAny, InferComplete, false},
    {"After", 2, 1, DataType::kAny, InferTokenOnly, false},
    {"Gate", 2, 2, DataType::kAny, InferSameShape, true},
    {"FusedElementwise", 1, 1, DataType::kFloat, InferElementwise, true, false, true},
    PagedAttention(DataType::kFloat, DataType::kFloat),
    PagedAttention(DataType::kFloat, DataType::kFloat16),
    PagedAttention(DataType::kFloat, DataType::kInt8),
    PagedAttention(DataType::kFloat16, DataType::kFloat),
    PagedAttention(DataType::kFloat16, DataType::kFloat16),
    PagedAttention(DataType::kFloat16, DataType::kInt8),
    PagedAttentionPart(DataType::kFloat, DataType::kFloat),
    PagedAttentionPart(DataType::kFloat, DataType::kFloat16),
    PagedAttentionPart(DataType::kFloat, DataType::kInt8),
    PagedAttentionPart(DataType::kFloat16, DataType::kFloat),
    PagedAttentionPart(DataType::kFloat16, DataType::kFloat16),
    PagedAttentionPart(DataType::kFloat16, DataType::kInt8),
    {"Rank", 0, 1, DataType::kInt64, InferScalar, false},
    {"GroupSize", 0, 1, DataType::kInt64, InferScalar, false},
};

/// An op, bound to one world. onnxruntime passes this object, as an OrtCustomOp, to each of its
/// functions.
struct Op : OrtCustomOp {
  Op(const Schema& op_schema, std::shared_ptr<World> op_world);

  const Schema& schema;
  const std::shared_ptr<World> world;  // null if the session has no world
};

const Op& Self(const OrtCustomOp* op) { return *static_cast<const Op*>(op); }

/// Calls `body`. Returns null, or if it throws, a status with the exception's message.
template <typename Body>
OrtStatus* Guard(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return MakeStatus(error.what());
  } catch (...) {
    return MakeStatus("onnxpar: unknown error");
  }
}

OrtStatus* NewKernel(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info,
                     void** kernel) {
  return Guard([&] {
    const KernelInfo node(info);
    const std::string name = std::string(Self(op).schema.name) + " '" + node.NodeName() + "'";
    if (!Self(op).world && Self(op).schema.operands == nullptr) {
      throw std::runtime_error(
          name + ": this process is not a rank; set the session config entry onnxpar.world, or " +
          "ONNXPAR_RANK, ONNXPAR_WORLD_SIZE and ONNXPAR_STORE in the environment");
    }
    try {
      *kernel = MakeKernel(Self(op).schema.name, node, Self(op).world).release();
    } catch (const std::exception& error) {
      throw std::runtime_error(name + ": " + error.what());
    }
  });
}

OrtStatus* Compute(void* kernel, OrtKernelContext* context) {
  return Guard([&] {
    NodeContext node(context);
    static_cast<Kernel*>(kernel)->Compute(node);
  });
}

OrtStatus* InferShape(const OrtCustomOp* op, OrtShapeInferContext* context) {
  return Guard([&] {
    ShapeContext node(context);
    Self(op).schema.infer(node, Self(op).world.get());
  });
}

/// Returns the type for a letter of `operands` or `results`; see Schema.
DataType TypeOf(const Schema& schema, char letter) {
  switch (letter) {
    case 'I':
      return DataType::kInt64;
    case 'F':
      return DataType::kFloat;
    case 'C':
      return schema.cache_type;
    default:
      return schema.fixed_type;
  }
}

DataType OutputType(const OrtCustomOp* op, size_t index) {
  const Schema& schema = Self(op).schema;
  if (schema.results != nullptr) return TypeOf(schema, schema.results[index]);
  if (schema.inputs == 0 || schema.variadic) return schema.fixed_type;
  return index + 1 == schema.outputs ? DataType::kBool : DataType::kAny;
}

size_t InPlaceFirst(int** inputs, int** outputs) {
  *inputs = new int[1]{0};
  *outputs = new int[1]{0};
  return 1;
}

/// Tells onnxruntime that output 0 may overwrite any of the first 8 inputs.
size_t InPlaceAny(int** inputs, int** outputs) {
  constexpr int kInputs = 8;
  *inputs = new int[kInputs];
  *outputs = new int[kInputs]{};
  std::iota(*inputs, *inputs + kInputs, 0);
  return kInputs;
}

void ReleaseInPlace(int* inputs, int* outputs) {
  delete[] inputs;
  delete[] outputs;
}

size_t InPlaceNone(int**, int**) { return 0; }

Op::Op(const Schema& op_schema, std::shared_ptr<World> op_world)
    : OrtCustomOp{}, schema(op_schema), world(std::move(op_world)) {
  version = kOrtApiVersion;
  GetName = [](const OrtCustomOp* op) { return Self(op).schema.name; };
  GetExecutionProviderType = [](const OrtCustomOp*) { return kProvider; };
  GetInputType = [](const OrtCustomOp* op, size_t index) {
    if (Self(op).schema.variadic) return Self(op).schema.fixed_type;
    if (const char* operands = Self(op).schema.operands) {
      return TypeOf(Self(op).schema, operands[index]);
    }
    if (index == 0) return DataType::kAny;
    return index + 1 == Self(op).schema.inputs ? DataType::kBool : DataType::kInt64;
  };
  GetInputTypeCount = [](const OrtCustomOp* op) {
    return Self(op).schema.inputs + (Self(op).schema.has_sizes ? 1 : 0);
  };
  GetOutputType = OutputType;
  GetOutputTypeCount = [](const OrtCustomOp* op) { return Self(op).schema.outputs; };
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  GetInputCharacteristic = [](const OrtCustomOp* op, size_t index) -> int {
    if (Self(op).schema.variadic) return kVariadic;
    if (const char* operands = Self(op).schema.operands) {
      return operands[index] == 't' ? kOptional : kRequired;
    }
    return index < Self(op).schema.inputs ? kRequired : kOptional;
  };
  GetOutputCharacteristic = [](const OrtCustomOp* op, size_t) -> int {
    return Self(op).schema.variadic ? kVariadic : kRequired;
  };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = NewKernel;
  KernelComputeV2 = Compute;
  InferOutputShapeFn = InferShape;
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return 1; };
  GetMayInplace = schema.variadic ? InPlaceAny : schema.in_place ? InPlaceFirst : InPlaceNone;
  ReleaseMayInplace = ReleaseInPlace;
  GetAliasMap = InPlaceNone;
  ReleaseAliasMap = ReleaseInPlace;
}

/// Returns the world that the session config entry onnxpar.world names, or without it, the world
/// that the environment describes; null if there is neither.
std::shared_ptr<World> WorldOf(const OrtSessionOptions* options) {
  const std::string id = SessionConfigEntry(options, "onnxpar.world");
  if (id.empty()) return WorldFromEnvironment();
  std::shared_ptr<World> world = World::Find(id);
  if (world) return world;
  throw std::runtime_error("session config entry onnxpar.world='" + id +
                           "' names no world of this process; create it first, and keep it open");
}

/// Returns the custom op domains for a world, which are created on first use; if `computes`, with
/// the domain of ops that need no world. The ops are never freed, because sessions keep pointers to
/// them and may outlive their options.
const std::vector<OrtCustomOpDomain*>& DomainsOf(const std::shared_ptr<World>& world,
                                                 bool computes) {
  static std::mutex mutex;
  static auto* known = new std::map<std::shared_ptr<World>, std::vector<OrtCustomOpDomain*>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<OrtCustomOpDomain*>& domains = (*known)[world];
  if (domains.empty()) {
    std::vector<OrtCustomOp*> ops, computing;
    for (const Schema& schema : kSchemas) {
      (schema.operands == nullptr ? ops : computing).push_back(new Op(schema, world));
    }
    domains = {NewDomain("onnxpar", ops)};
    if (computes) domains.push_back(NewDomain("onnxpar.compute", computing));
  }
  return domains;
}

}  // namespace
}  // namespace onnxpar

/// The entry point: onnxruntime calls it when a session registers this library. Returns null or an
/// error.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  if (!onnxpar::NegotiateApi(base)) {
    return onnxpar::MakeStatus(std::string("onnxpar needs onnxruntime 1.18 or later; this is ") +
                               base->GetVersionString());
  }
  const bool computes = !onnxpar::IsOlder(base, onnxpar::kSinceMinor);
  return onnxpar::Guard([&] {
    for (OrtCustomOpDomain* domain : onnxpar::DomainsOf(onnxpar::WorldOf(options), computes)) {
      onnxpar::AddDomain(options, domain);
    }
  });
}
