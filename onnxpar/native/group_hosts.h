// Which members of a group share a host, and who of them exchanges what with other hosts.
#pragma once

#include <cstddef>
#include <vector>

#include "block.h"

namespace onnxpar {

/// The members of a group by host. Ranks are on one host if they reach each other through shared
/// memory, or if a simulation says so.
///
/// The bytes of each member are a block: what it owns of a result. On its own host, the member
/// itself handles its block; on each other host, one member does. So the handlers of a block, one
/// on each host, are the only ones that exchange it between hosts, and all members drive the link.
class GroupHosts {
 public:
  /// `ranks` are the members' ranks in group order, and `hosts` the host of each rank of the world.
  GroupHosts(const std::vector<int>& ranks, int me, const std::vector<int>& hosts);

  /// The members of each host; hosts are in the order of their first members.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  /// The members of this member's host, and the number of that host.
  const std::vector<int>& locals() const { return hosts_[own_]; }
  size_t own() const { return own_; }

  /// The number of a member's host.
  size_t HostOf(int member) const { return host_of_[member]; }
  size_t Count() const { return hosts_.size(); }
  size_t Members() const { return host_of_.size(); }
  /// The number of members of the host that has most.
  size_t Largest() const;

  /// Returns who handles the block of `owner` on a host.
  int Handler(int owner, size_t host) const { return handlers_[owner * Count() + host]; }
  /// Returns the owners of the blocks that a member handles, in group order.
  std::vector<int> HandledBy(int member) const;

  /// Returns from whom, of another host, a member gets what all members of that host have.
  int Counterpart(int member, size_t host) const;

  /// Divides `elements` into a contiguous block for each member. All hosts have equal parts, and so
  /// have all members of a host.
  std::vector<Block> Parts(size_t elements, size_t element_size) const;

  /// Returns how many pieces of blocks a member may send in one step of a collective, through
  /// shared memory, on the host where these are most: see SharedMesh::MaxBytes.
  size_t PiecesOfStep() const;

 private:
  void FindHandlers();

  size_t own_ = 0;
  std::vector<std::vector<int>> hosts_;
  std::vector<size_t> host_of_;   // by member
  std::vector<size_t> place_of_;  // by member, among those of its host
  std::vector<int> handlers_;     // by owner and host
};

}  // namespace onnxpar
