// What the hub concludes from what the ranks tell it. Pure functions of the members' states.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "messages.h"

namespace onnxpar {

/// What the hub knows of one rank.
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

/// Who has not left a run that was interrupted.
std::string DescribeUnready(const std::vector<Member>& members, double seconds);

/// A member that disagrees with `rank` about the collective that both wait in, if there is one.
std::optional<std::string> FindDisagreement(const std::vector<Member>& members, int rank);

/// A member that left before the collective that `rank` waits in, if there is one.
std::optional<std::string> FindDeserter(const std::vector<Member>& members, int rank);

/// Who holds up `report`, given the `answers` of those who gave one.
std::string DescribeOverdue(const std::vector<Member>& members, const Report& report, int reporter,
                            const std::map<int, Answer>& answers, double seconds);

}  // namespace onnxpar
