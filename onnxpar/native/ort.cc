#include "ort.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace onnxpar {
namespace {

/// The function table, one for the whole process: two onnxruntimes in one process are not
/// supported.
std::atomic<const OrtApi*> api{nullptr};

template <typename Result, typename... Arguments>
Result Invoke(OrtFunction slot, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(const_cast<void*>(api.load()[slot]))(
      arguments...);
}

/// Calls the function in this slot of the table, which returns a status. Returns true if the call
/// succeeds; drops the error otherwise.
template <typename... Arguments>
bool Try(OrtFunction slot, Arguments... arguments) {
  auto* status = Invoke<OrtStatus*>(slot, arguments...);
  if (status == nullptr) return true;
  Invoke<void>(kReleaseStatus, status);
  return false;
}

template <typename... Arguments>
void Call(OrtFunction slot, Arguments... arguments) {
  auto* status = Invoke<OrtStatus*>(slot, arguments...);
  if (status == nullptr) return;
  std::string message =
      Invoke<const char*>(kGetErrorMessage, static_cast<const OrtStatus*>(status));
  Invoke<void>(kReleaseStatus, status);
  throw std::runtime_error(message);
}

/// Owns the type and shape information of a tensor, and frees it at the end of its scope.
struct OwnedInfo {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  ~OwnedInfo() {
    if (info != nullptr) Invoke<void>(kReleaseTensorTypeAndShapeInfo, info);
  }
};

Shape Dimensions(const OrtTensorTypeAndShapeInfo* info) {
  size_t count = 0;
  Call(kGetDimensionsCount, info, &count);
  Shape shape(count);
  Call(kGetDimensions, info, shape.data(), count);
  return shape;
}

DataType ElementType(const OrtTensorTypeAndShapeInfo* info) {
  DataType type = DataType::kAny;
  Call(kGetTensorElementType, info, &type);
  return type;
}

/// Returns a new symbol, which no model uses. onnxruntime would turn a dimension without a symbol
/// into the size -1.
std::string NewSymbol() {
  static std::atomic<uint64_t> next{0};
  return "onnxpar_dim_" + std::to_string(next++);
}

template <typename Values>
std::string Bracketed(const Values& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

}  // namespace

size_t ElementSize(DataType type) {
  switch (type) {
    case DataType::kUint8:
    case DataType::kInt8:
    case DataType::kBool:
      return 1;
    case DataType::kUint16:
    case DataType::kInt16:
    case DataType::kFloat16:
    case DataType::kBfloat16:
      return 2;
    case DataType::kFloat:
    case DataType::kInt32:
    case DataType::kUint32:
      return 4;
    case DataType::kInt64:
    case DataType::kDouble:
    case DataType::kUint64:
      return 8;
    default:
      throw std::runtime_error(std::string("collectives cannot send elements of type ") +
                               TypeName(type) + "; cast to a number or bool first");
  }
}

const char* TypeName(DataType type) {
  switch (static_cast<int>(type)) {
    case 1:
      return "float32";
    case 2:
      return "uint8";
    case 3:
      return "int8";
    case 4:
      return "uint16";
    case 5:
      return "int16";
    case 6:
      return "int32";
    case 7:
      return "int64";
    case 8:
      return "string";
    case 9:
      return "bool";
    case 10:
      return "float16";
    case 11:
      return "float64";
    case 12:
      return "uint32";
    case 13:
      return "uint64";
    case 14:
      return "complex64";
    case 15:
      return "complex128";
    case 16:
      return "bfloat16";
    default:
      return "a sub-byte or 8-bit float";
  }
}

std::string ToText(const std::vector<int64_t>& values) { return Bracketed(values); }
std::string ToText(const std::vector<int>& values) { return Bracketed(values); }

bool IsOlder(const OrtApiBase* base, int minor) {
  const std::string version = base->GetVersionString();  // "1.N.P"
  const size_t dot = version.find('.');
  const int own = dot == std::string::npos ? 0 : std::atoi(version.c_str() + dot + 1);
  return std::atoi(version.c_str()) == 1 && own < minor;
}

bool NegotiateApi(const OrtApiBase* base) {
  const bool old = IsOlder(base, static_cast<int>(kOrtApiVersion));
  // onnxruntime would print an error and return null for a version that it does not have.
  api = base->GetApi(old ? 1 : kOrtApiVersion);
  return !old;
}

OrtStatus* MakeStatus(const std::string& message) {
  return Invoke<OrtStatus*>(kCreateStatus, kOrtFail, message.c_str());
}

std::string SessionConfigEntry(const OrtSessionOptions* options, const char* key) {
  int present = 0;
  Call(kHasSessionConfigEntry, options, key, &present);
  if (present == 0) return "";
  size_t size = 0;
  Try(kGetSessionConfigEntry, options, key, static_cast<char*>(nullptr), &size);
  std::string value(size, '\0');
  Call(kGetSessionConfigEntry, options, key, value.data(), &size);
  value.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
  return value;
}

OrtCustomOpDomain* NewDomain(const char* name, const std::vector<OrtCustomOp*>& ops) {
  OrtCustomOpDomain* domain = nullptr;
  Call(kCreateCustomOpDomain, name, &domain);
  for (OrtCustomOp* op : ops) Call(kCustomOpDomainAdd, domain, static_cast<const OrtCustomOp*>(op));
  return domain;
}

void AddDomain(OrtSessionOptions* options, OrtCustomOpDomain* domain) {
  Call(kAddCustomOpDomain, options, domain);
}

std::string KernelInfo::NodeName() const {
  size_t size = 0;
  Try(kKernelInfoGetNodeName, info_, static_cast<char*>(nullptr), &size);
  std::string name(size, '\0');
  if (size == 0 || !Try(kKernelInfoGetNodeName, info_, name.data(), &size)) return "";
  name.resize(size - 1);
  return name;
}

int64_t KernelInfo::Int(const char* name) const {
  int64_t value = 0;
  if (!Try(kKernelInfoGetAttributeInt64, info_, name, &value)) {
    throw std::runtime_error(std::string("attribute '") + name + "' (an int) is missing");
  }
  return value;
}

int64_t KernelInfo::Int(const char* name, int64_t otherwise) const {
  int64_t value = 0;
  return Try(kKernelInfoGetAttributeInt64, info_, name, &value) ? value : otherwise;
}

float KernelInfo::Float(const char* name, float otherwise) const {
  float value = 0;
  return Try(kKernelInfoGetAttributeFloat, info_, name, &value) ? value : otherwise;
}

std::string KernelInfo::String(const char* name, const char* otherwise) const {
  size_t size = 0;
  Try(kKernelInfoGetAttributeString, info_, name, static_cast<char*>(nullptr), &size);
  if (size == 0) return otherwise;
  std::string value(size, '\0');
  if (!Try(kKernelInfoGetAttributeString, info_, name, value.data(), &size)) return otherwise;
  value.resize(size - 1);
  return value;
}

std::vector<int64_t> KernelInfo::Ints(const char* name) const {
  std::vector<int64_t> values = IntsOrNone(name);
  if (values.empty()) {
    throw std::runtime_error(std::string("attribute '") + name + "' (ints) is missing or empty");
  }
  return values;
}

std::vector<int64_t> KernelInfo::IntsOrNone(const char* name) const {
  size_t count = 0;
  Try(kKernelInfoGetAttributeArrayInt64, info_, name, static_cast<int64_t*>(nullptr), &count);
  std::vector<int64_t> values(count);
  if (count == 0 || !Try(kKernelInfoGetAttributeArrayInt64, info_, name, values.data(), &count)) {
    return {};
  }
  return values;
}

size_t Tensor::Elements() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t bytes = static_cast<int64_t>(ElementSize(type));
  size_t count = 1;
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) {
      throw std::runtime_error("a tensor of shape " + ToText(shape) + " is too large");
    }
    count *= static_cast<size_t>(extent);
  }
  return count;
}

size_t NodeContext::InputCount() const {
  size_t count = 0;
  Call(kKernelContextGetInputCount, static_cast<const OrtKernelContext*>(context_), &count);
  return count;
}

Tensor NodeContext::Input(size_t index) const {
  const OrtValue* value = nullptr;
  Call(kKernelContextGetInput, static_cast<const OrtKernelContext*>(context_), index, &value);
  OwnedInfo owned;
  Call(kGetTensorTypeAndShape, value, &owned.info);
  Tensor tensor{ElementType(owned.info), Dimensions(owned.info), nullptr};
  Call(kGetTensorMutableData, const_cast<OrtValue*>(value), &tensor.data);
  return tensor;
}

bool NodeContext::Has(size_t index) const {
  if (index >= InputCount()) return false;
  const OrtValue* value = nullptr;
  Call(kKernelContextGetInput, static_cast<const OrtKernelContext*>(context_), index, &value);
  return value != nullptr;
}

size_t NodeContext::OutputCount() const {
  size_t count = 0;
  Call(kKernelContextGetOutputCount, static_cast<const OrtKernelContext*>(context_), &count);
  return count;
}

void* NodeContext::Output(size_t index, const Shape& shape) {
  OrtValue* value = nullptr;
  void* data = nullptr;
  Call(kKernelContextGetOutput, context_, index, shape.data(), shape.size(), &value);
  Call(kGetTensorMutableData, value, &data);
  return data;
}

namespace {

/// The function that onnxruntime's threads call for index i. Its name lets ThreadSanitizer
/// recognize these threads.
void InParallelFor(void* body, size_t i) {
  (*static_cast<const std::function<void(size_t)>*>(body))(i);
}

}  // namespace

void NodeContext::ParallelFor(size_t count, const std::function<void(size_t)>& body) {
  if (count < 2) return KernelContext::ParallelFor(count, body);
  constexpr size_t kBatchPerThread = 0;
  Call(kKernelContextParallelFor, static_cast<const OrtKernelContext*>(context_), &InParallelFor,
       count, kBatchPerThread, const_cast<void*>(static_cast<const void*>(&body)));
}

std::vector<Dimension> ShapeContext::Input(size_t index) const {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  if (!Try(kShapeInferContextGetInputTypeShape, static_cast<const OrtShapeInferContext*>(context_),
           index, &info)) {
    return {};
  }
  const Shape shape = Dimensions(info);
  std::vector<const char*> symbols(shape.size(), nullptr);
  Call(kGetSymbolicDimensions, static_cast<const OrtTensorTypeAndShapeInfo*>(info), symbols.data(),
       symbols.size());
  std::vector<Dimension> dimensions(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    dimensions[i].size = shape[i];
    if (symbols[i] != nullptr) dimensions[i].symbol = symbols[i];
  }
  return dimensions;
}

DataType ShapeContext::InputType(size_t index) const {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Call(kShapeInferContextGetInputTypeShape, static_cast<const OrtShapeInferContext*>(context_),
       index, &info);
  return ElementType(info);
}

void ShapeContext::SetOutput(size_t index, DataType type,
                             const std::vector<Dimension>& dimensions) {
  Shape shape;
  std::vector<std::string> symbols;
  const auto append = [&](const Dimension& dimension) {
    shape.push_back(dimension.size);
    const bool unnamed = dimension.size < 0 && dimension.symbol.empty();
    symbols.push_back(unnamed ? NewSymbol() : dimension.symbol);
  };
  if (index == 0) std::for_each(prefix_.begin(), prefix_.end(), append);
  std::for_each(dimensions.begin(), dimensions.end(), append);
  std::vector<const char*> names;
  for (const std::string& symbol : symbols) names.push_back(symbol.c_str());

  OwnedInfo owned;
  Call(kCreateTensorTypeAndShapeInfo, &owned.info);
  Call(kSetTensorElementType, owned.info, type);
  Call(kSetDimensions, owned.info, static_cast<const int64_t*>(shape.data()), shape.size());
  Call(kSetSymbolicDimensions, owned.info, names.data(), names.size());
  Call(kShapeInferContextSetOutputTypeShape, static_cast<const OrtShapeInferContext*>(context_),
       index, static_cast<const OrtTensorTypeAndShapeInfo*>(owned.info));
}

int64_t ShapeContext::Int(const char* name, int64_t otherwise) const {
  const OrtOpAttr* attribute = nullptr;
  int64_t value = 0;
  size_t size = 0;
  const bool found =
      Try(kShapeInferContextGetAttribute, static_cast<const OrtShapeInferContext*>(context_), name,
          &attribute) &&
      Try(kReadOpAttr, attribute, kOrtAttrInt, static_cast<void*>(&value), sizeof(value), &size);
  return found ? value : otherwise;
}

std::vector<int64_t> ShapeContext::Ints(const char* name) const {
  const OrtOpAttr* attribute = nullptr;
  if (!Try(kShapeInferContextGetAttribute, static_cast<const OrtShapeInferContext*>(context_), name,
           &attribute)) {
    return {};
  }
  size_t bytes = 0;
  Try(kReadOpAttr, attribute, kOrtAttrInts, static_cast<void*>(nullptr), size_t{0}, &bytes);
  std::vector<int64_t> values(bytes / sizeof(int64_t));
  if (values.empty() || !Try(kReadOpAttr, attribute, kOrtAttrInts,
                             static_cast<void*>(values.data()), bytes, &bytes)) {
    return {};
  }
  return values;
}

}  // namespace onnxpar
