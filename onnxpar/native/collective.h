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

/// The base of the kernels that communicate: a kernel that runs together with the kernels of the
/// same node on the other ranks of its group, the members.
class Collective : public Kernel {
 public:
  /// Runs Execute, and then writes the last output, the token: an empty tensor that only orders
  /// nodes. If Execute throws, interrupts the run on all ranks, so that no rank waits for this one.
  void Compute(KernelContext& context) final;

  /// Returns the shape of output 0 on this rank, before the collective runs. A size that depends on
  /// what the other members send is 0.
  virtual Shape ResultShape(const KernelContext& context) const { return context.Input(0).shape; }

  const Group& group() const { return group_; }

  /// The index of the optional input with the size of each member's shard, in ops that divide X.
  static constexpr size_t kSizes = 2;

 protected:
  Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world);
  /// For a message between two ranks, which are the group: `pair` has them in ascending order.
  Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world,
             const std::vector<int64_t>& pair);

  /// Returns an integer attribute that must be the same on all members: if it differs, no message
  /// of this collective is delivered, and the hub reports the difference.
  int64_t AgreeInt(const KernelInfo& info, const char* attribute);
  /// Returns an attribute with one size for each member, which must be the same on all members;
  /// empty if the attribute is absent.
  std::vector<int64_t> AgreeSizes(const KernelInfo& info, const char* attribute);
  /// Returns an attribute with any number of integers, which must be the same on all members; empty
  /// if the attribute is absent.
  std::vector<int64_t> AgreeInts(const KernelInfo& info, const char* attribute);
  std::string AgreeString(const KernelInfo& info, const char* attribute, const char* otherwise);
  void Agree(const char* name, int64_t value);
  /// Returns an attribute with one size for each member, as AgreeSizes does, but members may have
  /// different sizes. They only appear in error messages.
  std::vector<int64_t> NoteSizes(const KernelInfo& info, const char* attribute);

  /// Computes all outputs except the last, the token.
  virtual void Execute(KernelContext& context) = 0;

  /// Returns the shape of the token, which begins with 0, so it has no elements. Profiles of
  /// onnxruntime show shapes but no values: a kernel can put numbers that depend on data, such as
  /// the bytes it sent, into the further dimensions.
  virtual Shape TokenShape(const KernelContext&) const { return {0}; }

  /// Runs body(transport, call), which exchanges the messages of this collective. Members receive
  /// each other's messages only if they agree on the attributes, on the type of `x`, and on
  /// `common`, the part of its shape that must be the same on all members.
  template <typename Body>
  void Run(const Tensor& x, const Shape& common, const Body& body) {
    Run(x, common, body, sends_, receives_);
  }

  /// Like the function above, with the numbers of elements that this rank sends to and receives
  /// from each member in this run, which the hub compares between members.
  template <typename Body>
  void Run(const Tensor& x, const Shape& common, const Body& body,
           const std::vector<int64_t>* sends, const std::vector<int64_t>* receives) {
    ElementSize(x.type);  // throws for types that cannot be sent
    const uint64_t signature = Mix(Mix(signature_, static_cast<uint64_t>(x.type)), common);
    world_->Run({name_, details_, group_, signature, x.type, x.shape, sends, receives}, body);
  }

  /// An AllGather of a few integers within the collective `call`. All members pass lists `own` of
  /// the same length n; returns n numbers for each member, concatenated in the order of the group.
  static std::vector<int64_t> GatherNumbers(Transport& transport, const Call& call,
                                            const std::vector<int64_t>& own);

  /// Like GatherNumbers, for one number of each member: returns each member's `extent`.
  static std::vector<int64_t> GatherExtents(Transport& transport, const Call& call, int64_t extent);

  /// If this rank is the group's only member, copies `x` to output 0 and returns true. Else returns
  /// false and does nothing.
  bool Alone(KernelContext& context, const Tensor& x) const;

  /// Copies the elements of `x` to the memory `y`, which may be that of `x`.
  static void CopyTensor(const Tensor& x, void* y);

  /// Sets the numbers of elements along the axis that this rank sends to and receives from each
  /// member in every run, so that the hub can report a pair of members that disagree.
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
