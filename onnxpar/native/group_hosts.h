// Finds the members of a group that share a host, and the members that exchange bytes with other
// hosts.
#pragma once

#include <cstddef>
#include <vector>

#include "block.h"

namespace onnxpar {

/// The members of a group by host. Ranks are on one host if they reach each other through shared
/// memory, or if a simulation says so.
///
/// Each member owns a block of a result. On its own host, the member itself handles its block; on
/// each other host, one member handles it. Only the handlers of a block, one on each host, exchange
/// it between hosts, so that all members drive the link.
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
  /// The number of members of the host with the most members.
  size_t Largest() const;

  /// Returns the member that handles the block of `owner` on a host.
  int Handler(int owner, size_t host) const { return handlers_[owner * Count() + host]; }
  /// Returns the owners of the blocks that a member handles, in group order.
  std::vector<int> HandledBy(int member) const;

  /// Returns the member of another host from which a member gets the result of that host.
  int Counterpart(int member, size_t host) const;

  /// Divides `elements` into a contiguous block for each member. All hosts have equal parts, and
  /// all members of a host have equal parts.
  std::vector<Block> Parts(size_t elements, size_t element_size) const;

  /// Returns the number of pieces of blocks that a member may send through shared memory in one
  /// step of a collective, on the host where this number is largest: see SharedMesh::MaxBytes.
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
