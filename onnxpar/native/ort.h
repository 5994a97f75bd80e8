// C++ wrappers of the few functions of onnxruntime's C API that the ops need; errors become
// exceptions.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace onnxpar {

using Shape = std::vector<int64_t>;

/// Returns the size of one element in bytes. Throws for a type that collectives cannot send.
size_t ElementSize(DataType type);

/// Returns NumPy's name of a type, e.g. "float32".
const char* TypeName(DataType type);

/// Returns numbers as text, e.g. "[2, 3]".
std::string ToText(const std::vector<int64_t>& values);
std::string ToText(const std::vector<int>& values);

/// Returns true if an onnxruntime is older than 1.`minor`.
bool IsOlder(const OrtApiBase* base, int minor);

/// Stores the function table of the onnxruntime that loaded this library. Returns false if it is
/// older than 1.18; then only MakeStatus may be called.
bool NegotiateApi(const OrtApiBase* base);

OrtStatus* MakeStatus(const std::string& message);

/// Returns the value of a session's config entry, or an empty string.
std::string SessionConfigEntry(const OrtSessionOptions* options, const char* key);

/// Creates a domain with these ops, which must outlive it.
OrtCustomOpDomain* NewDomain(const char* name, const std::vector<OrtCustomOp*>& ops);

/// Adds the domain, which must outlive the session, to `options`.
void AddDomain(OrtSessionOptions* options, OrtCustomOpDomain* domain);

/// The name and attributes of a node; valid only while its kernel is created.
class KernelInfo {
 public:
  explicit KernelInfo(const OrtKernelInfo* info) : info_(info) {}
  std::string NodeName() const;
  int64_t Int(const char* name) const;
  int64_t Int(const char* name, int64_t otherwise) const;
  float Float(const char* name, float otherwise) const;
  std::string String(const char* name, const char* otherwise) const;
  std::vector<int64_t> Ints(const char* name) const;
  /// Returns the ints of an attribute; empty if it is absent.
  std::vector<int64_t> IntsOrNone(const char* name) const;

 private:
  const OrtKernelInfo* info_;
};

/// A tensor of a running session; onnxruntime owns the memory.
struct Tensor {
  DataType type;
  Shape shape;
  void* data;

  /// Returns the number of elements. Throws if it exceeds any memory, as with sizes that data
  /// decide.
  size_t Elements() const;
  size_t Bytes() const { return Elements() * ElementSize(type); }
};

/// The inputs and outputs of a node, as its kernel sees them.
class KernelContext {
 public:
  virtual ~KernelContext() = default;
  virtual size_t InputCount() const = 0;
  virtual Tensor Input(size_t index) const = 0;
  /// Returns true if the node has this input, which is optional.
  virtual bool Has(size_t index) const = 0;
  virtual size_t OutputCount() const = 0;
  /// Allocates output `index`, whose type the schema determines; returns its memory.
  virtual void* Output(size_t index, const Shape& shape) = 0;
  /// Calls body(0) to body(count - 1), which must not throw, on the threads of the session.
  virtual void ParallelFor(size_t count, const std::function<void(size_t)>& body) {
    for (size_t i = 0; i < count; ++i) body(i);
  }
};

/// The inputs and outputs of a node of a session; valid only while onnxruntime runs the kernel.
class NodeContext : public KernelContext {
 public:
  explicit NodeContext(OrtKernelContext* context) : context_(context) {}
  size_t InputCount() const override;
  Tensor Input(size_t index) const override;
  bool Has(size_t index) const override;
  size_t OutputCount() const override;
  void* Output(size_t index, const Shape& shape) override;
  void ParallelFor(size_t count, const std::function<void(size_t)>& body) override;

 private:
  OrtKernelContext* context_;
};

/// A dimension during shape inference: its size, or -1 and a symbol if the size is unknown.
struct Dimension {
  int64_t size = -1;
  std::string symbol;
};

/// A node during onnxruntime's shape inference.
class ShapeContext {
 public:
  explicit ShapeContext(OrtShapeInferContext* context) : context_(context) {}
  /// Adds dimensions before the dimensions that are set for output 0.
  void PrefixOutput(const std::vector<Dimension>& dimensions) { prefix_ = dimensions; }
  /// Returns the dimensions of an input; empty for a scalar or if their number is unknown, because
  /// onnxruntime presents both alike.
  std::vector<Dimension> Input(size_t index) const;
  DataType InputType(size_t index) const;
  void SetOutput(size_t index, DataType type, const std::vector<Dimension>& dimensions);
  int64_t Int(const char* name, int64_t otherwise) const;
  std::vector<int64_t> Ints(const char* name) const;

 private:
  OrtShapeInferContext* context_;
  std::vector<Dimension> prefix_;
};

}  // namespace onnxpar
