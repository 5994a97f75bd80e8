// The stages of collectives that reduce or gather: one stage inside each host, and one between
// hosts. README.md, "Several hosts", has an overview.
#pragma once

#include <functional>
#include <vector>

#include "chunks.h"
#include "group_hosts.h"
#include "reduce.h"
#include "transport.h"

namespace onnxpar {

/// The phases of a collective. The phase is a part of each message's slot (the hash on which both
/// ends must agree), so messages of different phases never match.
enum Phase { kMove, kReduceInside, kReduceBetween, kGatherBetween, kGatherInside };

/// What the stages of one collective have in common.
struct Setting {
  Setting(Links& links, const Call& call, const GroupHosts& hosts);

  Links& links;
  const Call& call;
  const GroupHosts& hosts;
  const Cut cut;
  /// How many chunks the stage between hosts is behind the stage inside hosts, so that chunks
  /// travel over the network while the next chunks are reduced; 0 on one host.
  const size_t lag;

  /// Returns the number of chunks of the largest of these blocks.
  size_t CountOf(const std::vector<Block>& blocks) const;
};

/// Scratch memory that stages keep between collectives.
struct StageScratch {
  Scratch inside, between, own;
};

/// A reduction in two stages. Inside each host, members send their operands of each block to the
/// block's handler on that host (see GroupHosts), which reduces them to a partial result. Between
/// hosts, handlers send partial results to the members that need them, which reduce them in the
/// order of hosts.
class Reducing {
 public:
  /// A ReduceScatter: member i gets the reduction of blocks[i] of all members' `in`, contiguous in
  /// `out`.
  static Reducing ToOwners(const Setting& setting, const Reduction& reduction, const void* in,
                           const std::vector<Block>& blocks, void* out, StageScratch& scratch);
  /// An AllReduce in one step, for few bytes: every member gets the reduction of all `bytes` of
  /// `in`.
  static Reducing ToAll(const Setting& setting, const Reduction& reduction, const void* in,
                        size_t bytes, void* out, StageScratch& scratch);

  /// Reduces into `out`, chunk by chunk; calls after_chunk(i) when chunk i of `out` is complete.
  void Run(const std::function<void(size_t)>& after_chunk);

 private:
  /// A block whose operands of this host this member reduces.
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
/// other host, and each handler sends it to the other members of its host.
class Gathering {
 public:
  /// Prepares to fill `out` on every member: blocks[i] is the place in `out` of member i's block.
  /// `own` is the place from which this member's own block is sent.
  Gathering(const Setting& setting, const Part& own, void* out, const std::vector<Block>& blocks,
            StageScratch& scratch);

  /// Sends chunk number `chunk` of this member's block, once its bytes are there. Call it for 0, 1,
  /// ...
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
