// C++ wrappers of the few functions of onnxruntime's C API that the ops need; errors become
// exceptions.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace onnxpar {

using Shape = std::vector<int64_t>;

/// Returns the size of one element in bytes. Throws for a type that collectives do not support.
size_t ElementSize(DataType type);

/// Returns NumPy's name of a type, e.g. "float32".
const char* TypeName(DataType type);

/// Returns numbers as text, e.g. "[2, 3]".
std::string ToText(const std::vector<int64_t>& values);
std::string ToText(const std::vector<int>& values);

/// True if the onnxruntime with this API is older than 1.`minor`.
bool IsOlder(const OrtApiBase* base, int minor);

/// Keeps the function table of the onnxruntime that loaded this library, for all later calls.
/// Returns false if it is older than 1.18; then only MakeStatus may be called.
bool NegotiateApi(const OrtApiBase* base);

OrtStatus* MakeStatus(const std::string& message);

/// Returns the value of an entry in a session's configuration; "" if it is not set.
std::string SessionConfigEntry(const OrtSessionOptions* options, const char* key);

/// Returns a new domain with these ops, which must exist for as long as the domain does.
OrtCustomOpDomain* NewDomain(const char* name, const std::vector<OrtCustomOp*>& ops);

/// Adds the domain, which must outlive the session, to `options`.
void AddDomain(OrtSessionOptions* options, OrtCustomOpDomain* domain);

/// The name and the attributes of a node, while its kernel is created; not valid later.
class KernelInfo {
 public:
  explicit KernelInfo(const OrtKernelInfo* info) : info_(info) {}
  std::string NodeName() const;
  int64_t Int(const char* name) const;
  int64_t Int(const char* name, int64_t otherwise) const;
  float Float(const char* name, float otherwise) const;
  std::string String(const char* name, const char* otherwise) const;
  std::vector<int64_t> Ints(const char* name) const;
  /// Returns an attribute that is a list of integers; an empty list if the node does not have it.
  std::vector<int64_t> IntsOrNone(const char* name) const;

 private:
  const OrtKernelInfo* info_;
};

/// A tensor in a running session, with its address; onnxruntime owns the memory.
struct Tensor {
  DataType type;
  Shape shape;
  void* data;

  /// Returns the number of elements. Throws if it is too large for any memory, which can happen
  /// with sizes that depend on data.
  size_t Elements() const;
  size_t Bytes() const { return Elements() * ElementSize(type); }
};

/// The inputs and outputs of a node, as its kernel sees them.
class KernelContext {
 public:
  virtual ~KernelContext() = default;
  virtual size_t InputCount() const = 0;
  virtual Tensor Input(size_t index) const = 0;
  /// True if the node has input number `index`; optional inputs may be absent.
  virtual bool Has(size_t index) const = 0;
  virtual size_t OutputCount() const = 0;
  /// Allocates output number `index` with this shape (the schema determines its type), and returns
  /// the memory to write to.
  virtual void* Output(size_t index, const Shape& shape) = 0;
  /// Calls body(0) to body(count - 1), in any order, on the threads of the session; returns after
  /// all calls. `body` must not throw.
  virtual void ParallelFor(size_t count, const std::function<void(size_t)>& body) {
    for (size_t i = 0; i < count; ++i) body(i);
  }
};

/// The inputs and outputs of a node of a session; valid while onnxruntime runs the node's kernel.
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

/// A dimension in shape inference: its size; or if the size is unknown, -1 and a symbol, which may
/// be empty.
struct Dimension {
  int64_t size = -1;
  std::string symbol;
};

/// A node during onnxruntime's shape inference: reads the shapes of its inputs, and sets those of
/// its outputs.
class ShapeContext {
 public:
  explicit ShapeContext(OrtShapeInferContext* context) : context_(context) {}
  /// From now on, SetOutput inserts these dimensions before those that it gets for output 0.
  void PrefixOutput(const std::vector<Dimension>& dimensions) { prefix_ = dimensions; }
  /// Returns the dimensions of an input; an empty list for a scalar, and also if the number of
  /// dimensions is unknown, because onnxruntime does not distinguish these.
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
