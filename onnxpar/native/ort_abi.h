// The part of onnxruntime's C ABI that the plugin uses, declared by hand.
//
// No Python wheel ships onnxruntime's headers. Its C ABI is append-only: a function always keeps
// its slot in the OrtApi table, and a field its place in OrtCustomOp. So these few declarations
// work with every onnxruntime from 1.18 on.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtTensorTypeAndShapeInfo;
struct OrtOpAttr;
struct OrtValue;

/// A table of function pointers; `OrtFunction` names the slots.
using OrtApi = const void*;

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

namespace onnxpar {

/// The version of OrtApi and OrtCustomOp that the plugin uses.
constexpr uint32_t kOrtApiVersion = 18;

/// The code of every error: ORT_FAIL. With ORT_EP_FAIL (11), onnxruntime's Python API would rebuild
/// the session and run the collective again.
constexpr int kOrtFail = 1;

/// Slots of the OrtApi table.
enum OrtFunction : size_t {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kCreateTensorTypeAndShapeInfo = 57,
  kSetTensorElementType = 58,
  kSetDimensions = 59,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetSymbolicDimensions = 63,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeFloat = 85,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelInfoGetAttributeString = 87,
  kKernelContextGetInputCount = 88,
  kKernelContextGetOutputCount = 89,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelInfoGetAttributeArrayInt64 = 163,
  kHasSessionConfigEntry = 237,
  kGetSessionConfigEntry = 238,
  kKernelInfoGetNodeName = 244,
  kShapeInferContextGetInputTypeShape = 268,
  kShapeInferContextGetAttribute = 269,
  kShapeInferContextSetOutputTypeShape = 270,
  kSetSymbolicDimensions = 271,
  kReadOpAttr = 272,
  kKernelContextParallelFor = 274,
};

/// ONNXTensorElementDataType, with the same numbers as TensorProto.DataType.
enum class DataType : int {
  kAny = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kUint16 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kDouble = 11,
  kUint32 = 12,
  kUint64 = 13,
  kBfloat16 = 16,
};

/// OrtCustomOpInputOutputCharacteristic.
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

enum OrtOpAttrType : int { kOrtAttrInt = 1, kOrtAttrInts = 2 };

/// OrtCustomOp of version 18; the plugin's op objects derive from it.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  DataType (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  DataType (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};
static_assert(sizeof(OrtCustomOp) == 208, "OrtCustomOp has another layout than onnxruntime's");

}  // namespace onnxpar
