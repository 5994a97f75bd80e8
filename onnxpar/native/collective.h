// The common part of the kernels of all collectives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hash.h"
#include "kernels.h"
#include "ort.h"
#include "world.h"

namespace onnxpar {

/// A kernel whose members, over all ranks of its group, run together.
class Collective : public Kernel {
 public:
  /// A failure here ends the world, so that no other rank waits for this one.
  void Compute(KernelContext& context) final;

 protected:
  Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world);
  /// One end of a message between the two ranks of `pair`.
  Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world,
             const std::vector<int64_t>& pair);

  /// Reads an attribute that must be the same on all members.
  int64_t AgreeInt(const KernelInfo& info, const char* attribute);
  /// One size for each member; empty if the attribute is absent.
  std::vector<int64_t> AgreeSizes(const KernelInfo& info, const char* attribute);
  std::string AgreeString(const KernelInfo& info, const char* attribute, const char* otherwise);
  void Agree(const char* name, int64_t value);
  /// The same, for sizes that may differ between members.
  std::vector<int64_t> NoteSizes(const KernelInfo& info, const char* attribute);

  /// Computes all outputs but the last, the token.
  virtual void Execute(KernelContext& context) = 0;

  /// Calls body(transport, call) once the members agree on the type of `x`, on `common`, the part
  /// of its shape that they share, and on the attributes.
  template <typename Body>
  void Run(const Tensor& x, const Shape& common, const Body& body) {
    ElementSize(x.type);  // rejects what no transport carries
    const uint64_t signature = Mix(Mix(signature_, static_cast<uint64_t>(x.type)), common);
    world_->Run({name_, details_, group_, signature, x.type, x.shape, sends_, receives_}, body);
  }

  /// The numbers of all members, equally many of each, in the order of the group; runs within the
  /// collective `call`.
  static std::vector<int64_t> GatherNumbers(Transport& transport, const Call& call,
                                            const std::vector<int64_t>& own);

  /// The `extent` of each member.
  static std::vector<int64_t> GatherExtents(Transport& transport, const Call& call, int64_t extent);

  /// Copies `x` to output 0 if this rank is the only member.
  bool Alone(KernelContext& context, const Tensor& x) const;

  /// Copies `x` to `y`, which may be the same memory.
  static void CopyTensor(const Tensor& x, void* y);

  /// Declares the amounts that this rank sends to and receives from each member, if they may
  /// differ.
  void DeclareAmounts(const std::vector<int64_t>* sends, const std::vector<int64_t>* receives) {
    sends_ = sends;
    receives_ = receives;
  }

  const std::shared_ptr<World> world_;
  Group& group_;

 private:
  void AddDetail(const char* attribute, const std::string& value);

  std::string name_;     // e.g. AllReduce 'node' (tag 3)
  std::string details_;  // e.g. axis=0, sizes=[2, 3]
  uint64_t signature_;
  const std::vector<int64_t>* sends_ = nullptr;
  const std::vector<int64_t>* receives_ = nullptr;
};

}  // namespace onnxpar
