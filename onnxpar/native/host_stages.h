// The stages of collectives that reduce or gather: the stage inside each host, and the stage
// between hosts.
#pragma once

#include <functional>
#include <vector>

#include "chunks.h"
#include "group_hosts.h"
#include "reduce.h"
#include "transport.h"

namespace onnxpar {

/// The steps of a collective. They are part of the slot, so that messages of different steps do not
/// match.
enum Phase { kMove, kReduceInside, kReduceBetween, kGatherBetween, kGatherInside };

/// The settings that the stages of one collective share.
struct Setting {
  Setting(Links& links, const Call& call, const GroupHosts& hosts);

  Links& links;
  const Call& call;
  const GroupHosts& hosts;
  const Cut cut;
  /// The number of chunks by which a stage that needs messages from other hosts is behind the stage
  /// before it, so that these messages travel meanwhile.
  const size_t lag;

  /// The number of chunks of the largest block.
  size_t CountOf(const std::vector<Block>& blocks) const;
};

/// Scratch memory of stages.
struct StageScratch {
  Scratch inside, between, own;
};

/// A reduction in two stages. Inside each host, members send their operands of each block to its
/// handler there, which reduces them. Between hosts, handlers send these partial results to the
/// members that need them, which reduce them in the order of hosts.
class Reducing {
 public:
  /// A reduction in which every member i gets the result of blocks[i] of `in`.
  static Reducing ToOwners(const Setting& setting, const Reduction& reduction, const void* in,
                           const std::vector<Block>& blocks, void* out, StageScratch& scratch);
  /// A reduction in which every member gets the result of all `bytes` of `in`.
  static Reducing ToAll(const Setting& setting, const Reduction& reduction, const void* in,
                        size_t bytes, void* out, StageScratch& scratch);

  /// Reduces into `out`; calls after_chunk(i) after chunk i of `out` is complete.
  void Run(const std::function<void(size_t)>& after_chunk);

 private:
  /// A part of its host's operands that this member reduces.
  struct Partial {
    Block block;               // of `in`
    bool mine;                 // true if the result goes to `out`
    std::vector<int> targets;  // members of other hosts that need the result
  };

  struct Plan {
    std::vector<Partial> partials;
    std::vector<Part> sends;   // to other members of this host
    std::vector<int> sources;  // of the result: the member of each host that sends its partial
    size_t count = 0;          // of chunks
  };

  Reducing(const Setting& setting, const Reduction& reduction, const void* in, Plan plan, void* out,
           StageScratch& scratch);

  std::vector<Part> FromLocals() const;
  std::vector<Part> ToTargets() const;
  std::vector<Part> FromSources() const;
  const Block& Mine() const;
  bool MakesPartial(const Partial& partial) const;
  const void* OwnOperand(const Partial& partial, const Range& range);
  void ReduceInside(size_t chunk);
  void ReduceBetween(size_t chunk);

  const Setting& setting_;
  const Reduction inside_reduction_;
  const Reduction between_reduction_;
  const void* const in_;
  void* const out_;
  const Plan plan_;
  Scratch& own_;
  Chunks inside_;
  Chunks between_;
};

/// A gathering in two stages: every member sends its block to the block's handlers, one on each
/// host, and these send it to the other members of their host.
class Gathering {
 public:
  /// blocks[i] of `out` is the block of member i; this member's block is the part `own`.
  Gathering(const Setting& setting, const Part& own, void* out, const std::vector<Block>& blocks,
            StageScratch& scratch);

  /// Sends chunk number `chunk` of this member's block; chunks must be in order.
  void Post(size_t chunk);
  /// Waits until `out` is complete, after all chunks have been posted.
  void Finish();

 private:
  void PostInside(size_t chunk);

  const Setting& setting_;
  const size_t count_;
  Chunks between_;
  Chunks inside_;
};

}  // namespace onnxpar
