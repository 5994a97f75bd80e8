// How the members of a group are divided over hosts, and which of them exchange bytes with other
// hosts.
#pragma once

#include <cstddef>
#include <vector>

#include "block.h"

namespace onnxpar {

/// The members of a group by host. Ranks are on one host if they reach each other through shared
/// memory; a simulation may say otherwise.
///
/// Each member owns one block of a collective's result. A block has one handler on each host, the
/// only member there that exchanges the block with other hosts: on the owner's host, the owner
/// itself; on other hosts, the members take turns, so that all of them use the network.
class GroupHosts {
 public:
  /// `ranks` are the members' ranks in the world, in group order; `me` is the index of this rank in
  /// it; `hosts` has the host of each rank of the world.
  GroupHosts(const std::vector<int>& ranks, int me, const std::vector<int>& hosts);

  /// Returns the members on each host; hosts are in the order of their first members.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  /// Returns the members on this rank's host; own() is the index of this host in hosts().
  const std::vector<int>& locals() const { return hosts_[own_]; }
  size_t own() const { return own_; }

  /// Returns the index in hosts() of the host of a member.
  size_t HostOf(int member) const { return host_of_[member]; }
  size_t Count() const { return hosts_.size(); }
  size_t Members() const { return host_of_.size(); }
  /// Returns the number of members on the host that has the most.
  size_t Largest() const;

  /// Returns the member on host number `host` that handles the block of member `owner`.
  int Handler(int owner, size_t host) const { return handlers_[owner * Count() + host]; }
  /// Returns the owners of the blocks that a member handles on its host, in group order.
  std::vector<int> HandledBy(int member) const;

  /// Returns the member on another host that sends `member` that host's partial result, in an
  /// AllReduce of one step.
  int Counterpart(int member, size_t host) const;

  /// Divides a tensor of `elements` elements into one contiguous block for each member: first into
  /// equal parts for the hosts, then each part equally among the host's members.
  std::vector<Block> Parts(size_t elements, size_t element_size) const;

  /// Returns the most chunks that a member sends through shared memory in one step of a collective,
  /// over all hosts; see SharedMesh::MaxBytes, which needs the same number on all ranks.
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
