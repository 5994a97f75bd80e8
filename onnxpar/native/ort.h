// onnxruntime's C API as the few C++ calls that the ops need; errors become exceptions.
#pragma once

#include <string>
#include <vector>

#include "ort_abi.h"

namespace onnxpar {

using Shape = std::vector<int64_t>;

/// The size of one element in bytes; throws on a type that the ops do not carry.
size_t ElementSize(DataType type);

/// The name of a type as numpy spells it, e.g. "float32".
const char* TypeName(DataType type);

/// E.g. "[2, 3]".
std::string ToText(const std::vector<int64_t>& values);
std::string ToText(const std::vector<int>& values);

/// Keeps the function table of the onnxruntime that loaded us; false if it is older than 1.18, and
/// then good for MakeStatus only.
bool NegotiateApi(const OrtApiBase* base);

OrtStatus* MakeStatus(const std::string& message);

/// The value of a session's config entry, or an empty string.
std::string SessionConfigEntry(const OrtSessionOptions* options, const char* key);

/// The domain "onnxpar" with these ops, which must outlive it.
OrtCustomOpDomain* NewDomain(const std::vector<OrtCustomOp*>& ops);

/// Adds the domain, which must outlive the session, to `options`.
void AddDomain(OrtSessionOptions* options, OrtCustomOpDomain* domain);

/// The attributes of a node while its kernel is created.
class KernelInfo {
 public:
  explicit KernelInfo(const OrtKernelInfo* info) : info_(info) {}
  std::string NodeName() const;
  int64_t Int(const char* name) const;
  int64_t Int(const char* name, int64_t otherwise) const;
  std::string String(const char* name, const char* otherwise) const;
  std::vector<int64_t> Ints(const char* name) const;
  /// Empty if the attribute is absent.
  std::vector<int64_t> IntsOrNone(const char* name) const;

 private:
  const OrtKernelInfo* info_;
};

/// A tensor of a running session; the memory is onnxruntime's.
struct Tensor {
  DataType type;
  Shape shape;
  void* data;

  size_t Elements() const;
  size_t Bytes() const { return Elements() * ElementSize(type); }
};

/// The inputs and outputs of a node while its kernel runs.
class KernelContext {
 public:
  explicit KernelContext(OrtKernelContext* context) : context_(context) {}
  Tensor Input(size_t index) const;
  size_t OutputCount() const;
  /// Allocates output `index`; it has the type that the schema gives it.
  void* Output(size_t index, const Shape& shape);

 private:
  OrtKernelContext* context_;
};

/// A dimension during shape inference: a size, or a symbol if the size is unknown.
struct Dimension {
  int64_t size = -1;
  std::string symbol;
};

/// A node while onnxruntime infers shapes.
class ShapeContext {
 public:
  explicit ShapeContext(OrtShapeInferContext* context) : context_(context) {}
  /// Empty if the rank is unknown: onnxruntime shows a tensor of unknown rank as a scalar.
  std::vector<Dimension> Input(size_t index) const;
  DataType InputType(size_t index) const;
  void SetOutput(size_t index, DataType type, const std::vector<Dimension>& dimensions);
  int64_t Int(const char* name, int64_t otherwise) const;
  std::vector<int64_t> Ints(const char* name) const;

 private:
  OrtShapeInferContext* context_;
};

}  // namespace onnxpar
