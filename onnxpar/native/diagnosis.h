// The hub's conclusions from the ranks' reports, as pure functions of the members' states.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "messages.h"

namespace onnxpar {

/// The hub's knowledge of one rank.
struct Member {
  enum class State { kAbsent, kJoined, kLeft };

  int rank = 0;
  State state = State::kAbsent;
  std::string process;            // e.g. pid 4711 on host a
  bool is_ready = false;          // it has left the run that was interrupted
  std::optional<Report> waiting;  // its last report; it may be past that by now
  Runs ran;                       // when it left

  /// E.g. "rank 2 (pid 4711)".
  std::string Name() const;
};

/// An answer to: have you begun that collective?
struct Answer {
  bool begun = false;
  std::string doing;  // e.g. "in AllReduce 'n' (tag 3)"
};

/// Why no world is complete, e.g. "rank 2 has not joined within 5 s".
std::string DescribeAbsent(const std::vector<Member>& members, double seconds);

/// The ranks that have not left an interrupted run.
std::string DescribeUnready(const std::vector<Member>& members, double seconds);

/// A member that disagrees with `rank` about the collective that both wait in, if there is one.
std::optional<std::string> FindDisagreement(const std::vector<Member>& members, int rank);

/// A member that left before the collective that `rank` waits in, if there is one.
std::optional<std::string> FindDeserter(const std::vector<Member>& members, int rank);

/// The ranks that hold up the collective of `report`, given the `answers` of those that replied.
std::string DescribeOverdue(const std::vector<Member>& members, const Report& report, int reporter,
                            const std::map<int, Answer>& answers, double seconds);

}  // namespace onnxpar
