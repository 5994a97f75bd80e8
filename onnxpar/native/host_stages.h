// The stages of collectives that reduce or gather: inside each host, and between hosts.
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

/// What the stages of one collective have in common.
struct Setting {
  Setting(Links& links, const Call& call, const GroupHosts& hosts);

  Links& links;
  const Call& call;
  const GroupHosts& hosts;
  const Cut cut;
  /// How many chunks a stage that needs what came from other hosts is behind the one before it, so
  /// that these messages are under way meanwhile.
  const size_t lag;

  /// The number of chunks of the largest block.
  size_t CountOf(const std::vector<Block>& blocks) const;
};

/// Scratch memory of stages.
struct StageScratch {
  Scratch inside, between, own;
};

/// A reduction in two stages. Inside each host, members reduce their operands of each block at the
/// member that handles it there; between hosts, handlers send these partial results to the members
/// that need them, and these reduce them in the order of hosts.
class Reducing {
 public:
  /// Every member i gets the result of blocks[i] of `in`.
  static Reducing ToOwners(const Setting& setting, const Reduction& reduction, const void* in,
                           const std::vector<Block>& blocks, void* out, StageScratch& scratch);
  /// Every member gets the result of all `bytes` of `in`.
  static Reducing ToAll(const Setting& setting, const Reduction& reduction, const void* in,
                        size_t bytes, void* out, StageScratch& scratch);

  /// Reduces into `out`; calls after_chunk(i) after chunk i of it is complete.
  void Run(const std::function<void(size_t)>& after_chunk);

 private:
  /// What this member reduces of the operands of its host.
  struct Partial {
    Block block;               // of `in`
    bool mine;                 // and goes to `out`
    std::vector<int> targets;  // members of other hosts that need it
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

/// A gathering in two stages: every member sends its block to the members that handle it, on each
/// host one, and these send it to the others of their host.
class Gathering {
 public:
  /// blocks[i] of `out` is that of member i, which gives it as `own`.
  Gathering(const Setting& setting, const Part& own, void* out, const std::vector<Block>& blocks,
            StageScratch& scratch);

  /// Sends chunk number `chunk` of this member's block; chunks come one after the other.
  void Post(size_t chunk);
  /// Waits until `out` is complete; all chunks have been posted.
  void Finish();

 private:
  void PostInside(size_t chunk);

  const Setting& setting_;
  const size_t count_;
  Chunks between_;
  Chunks inside_;
};

}  // namespace onnxpar
