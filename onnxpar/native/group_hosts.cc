#include "group_hosts.h"

#include <algorithm>

namespace onnxpar {

GroupHosts::GroupHosts(const std::vector<int>& ranks, int me, const std::vector<int>& hosts)
    : host_of_(ranks.size()), place_of_(ranks.size()) {
  std::vector<int> found;  // hosts of the world, in the order of hosts_
  for (size_t member = 0; member < ranks.size(); ++member) {
    const auto at = std::find(found.begin(), found.end(), hosts[ranks[member]]);
    const auto host = static_cast<size_t>(at - found.begin());
    if (at == found.end()) {
      found.push_back(hosts[ranks[member]]);
      hosts_.emplace_back();
    }
    host_of_[member] = host;
    place_of_[member] = hosts_[host].size();
    hosts_[host].push_back(static_cast<int>(member));
  }
  own_ = host_of_[me];
  FindHandlers();
}

/// Sets the handler of each block on each host. On hosts other than the owner's, members take
/// turns.
void GroupHosts::FindHandlers() {
  handlers_.resize(Members() * Count());
  for (size_t host = 0; host < Count(); ++host) {
    size_t turn = 0;
    for (size_t owner = 0; owner < Members(); ++owner) {
      const bool own = host_of_[owner] == host;
      handlers_[owner * Count() + host] =
          own ? static_cast<int>(owner) : hosts_[host][turn++ % hosts_[host].size()];
    }
  }
}

size_t GroupHosts::Largest() const {
  size_t largest = 0;
  for (const auto& members : hosts_) largest = std::max(largest, members.size());
  return largest;
}

std::vector<int> GroupHosts::HandledBy(int member) const {
  std::vector<int> owners;
  for (int owner = 0; owner < static_cast<int>(Members()); ++owner) {
    if (Handler(owner, host_of_[member]) == member) owners.push_back(owner);
  }
  return owners;
}

int GroupHosts::Counterpart(int member, size_t host) const {
  return hosts_[host][place_of_[member] % hosts_[host].size()];
}

std::vector<Block> GroupHosts::Parts(size_t elements, size_t element_size) const {
  std::vector<Block> parts;
  for (size_t member = 0; member < Members(); ++member) {
    const size_t host = host_of_[member];
    const Range whole = PartOf(elements, Count(), host);
    const Range part = PartOf(whole.size, hosts_[host].size(), place_of_[member]);
    parts.push_back(Run(static_cast<int>(member), part.size * element_size,
                        (whole.begin + part.begin) * element_size));
  }
  return parts;
}

/// Inside its host, a member sends each other member the pieces that this one handles, and to all
/// the pieces that it handles itself. To other hosts, it sends the pieces that it handles for their
/// owners, and its own piece; these are in shared memory only if hosts are simulated.
size_t GroupHosts::PiecesOfStep() const {
  size_t most = 0;
  for (const auto& members : hosts_) {
    const size_t locals = members.size();
    const size_t others = (Members() - locals + locals - 1) / locals;
    const size_t inside = locals > 1 ? locals * (others + 1) : 0;
    most = std::max(most, inside + others + (others > 0 ? 1 : 0));
  }
  return most;
}

}  // namespace onnxpar
