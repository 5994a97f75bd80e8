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

/// A kernel that runs together with the kernels of the other ranks of its group, the members.
class Collective : public Kernel {
 public:
  /// Runs Execute, and sets the token. If Execute throws, interrupts the run on all ranks, so that
  /// no rank waits for this one.
  void Compute(KernelContext& context) final;

  /// The shape of output 0 on this rank; 0 stands for a size that only all members together know.
  virtual Shape ResultShape(const KernelContext& context) const { return context.Input(0).shape; }

  const Group& group() const { return group_; }

  /// The index of the optional input, in ops that cut X, with the sizes of the members' shards.
  static constexpr size_t kSizes = 2;

 protected:
  Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world);
  /// For a message between the two ranks of `pair`.
  Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world,
             const std::vector<int64_t>& pair);

  /// Reads an attribute that must be the same on all members.
  int64_t AgreeInt(const KernelInfo& info, const char* attribute);
  /// Reads one size for each member, the same on all members; empty if the attribute is absent.
  std::vector<int64_t> AgreeSizes(const KernelInfo& info, const char* attribute);
  /// Reads integers of any number, the same on all members; empty if the attribute is absent.
  std::vector<int64_t> AgreeInts(const KernelInfo& info, const char* attribute);
  std::string AgreeString(const KernelInfo& info, const char* attribute, const char* otherwise);
  void Agree(const char* name, int64_t value);
  /// Reads sizes like AgreeSizes, but they may differ between members.
  std::vector<int64_t> NoteSizes(const KernelInfo& info, const char* attribute);

  /// Computes all outputs except the last one, the token.
  virtual void Execute(KernelContext& context) = 0;

  /// The shape of the token, which has no elements. Profiles of onnxruntime contain shapes, but no
  /// values, so a kernel can report in this shape the numbers that data decided.
  virtual Shape TokenShape(const KernelContext&) const { return {0}; }

  /// Calls body(transport, call). Members exchange messages only if they agree on the attributes,
  /// on the type of `x`, and on `common`, the part of its shape that must be the same.
  template <typename Body>
  void Run(const Tensor& x, const Shape& common, const Body& body) {
    Run(x, common, body, sends_, receives_);
  }

  /// Calls body(transport, call), too; `sends` and `receives` have the numbers of elements that
  /// this rank sends to and receives from each member in this run.
  template <typename Body>
  void Run(const Tensor& x, const Shape& common, const Body& body,
           const std::vector<int64_t>* sends, const std::vector<int64_t>* receives) {
    ElementSize(x.type);  // throws for types that cannot be sent
    const uint64_t signature = Mix(Mix(signature_, static_cast<uint64_t>(x.type)), common);
    world_->Run({name_, details_, group_, signature, x.type, x.shape, sends, receives}, body);
  }

  /// Returns the numbers of all members, in the order of the group; all members pass the same
  /// number of numbers. Runs as a part of the collective `call`.
  static std::vector<int64_t> GatherNumbers(Transport& transport, const Call& call,
                                            const std::vector<int64_t>& own);

  /// Returns the `extent` that each member passes, in the order of the group.
  static std::vector<int64_t> GatherExtents(Transport& transport, const Call& call, int64_t extent);

  /// If this rank is the only member, copies `x` to output 0 and returns true.
  bool Alone(KernelContext& context, const Tensor& x) const;

  /// Copies `x` to `y`, which may be the same memory.
  static void CopyTensor(const Tensor& x, void* y);

  /// Declares the numbers of elements along the axis that this rank sends to and receives from each
  /// member, so that the hub can compare them.
  void DeclareAmounts(const std::vector<int64_t>* sends, const std::vector<int64_t>* receives) {
    sends_ = sends;
    receives_ = receives;
  }

  const std::shared_ptr<World> world_;
  Group& group_;

 private:
  void NoteStream();
  void AddDetail(const char* attribute, const std::string& value);

  std::string name_;     // e.g. AllReduce 'node' (tag 3)
  std::string details_;  // e.g. axis=0, sizes=[2, 3]
  uint64_t signature_;
  const std::vector<int64_t>* sends_ = nullptr;
  const std::vector<int64_t>* receives_ = nullptr;
};

}  // namespace onnxpar
