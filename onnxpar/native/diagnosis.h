// The hub's conclusions from the ranks' reports: pure functions of the states of all ranks.
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
  std::string process;                 // e.g. pid 4711
  std::string host;                    // its name
  bool names_host = false;             // true if the ranks are on several hosts
  bool is_ready = false;               // it has left the interrupted run
  std::map<uint64_t, Report> waiting;  // its last report of each stream, which may be outdated
  Runs ran;                            // collectives that it had begun when it left
  std::string why;                     // why it left, if it has failed

  /// E.g. "rank 2 (pid 4711)", or "rank 2 (pid 4711 on b)".
  std::string Name() const;
  /// E.g. "rank 2 (pid 4711) left the world", with `before` and the reason after it.
  std::string Left(const std::string& before = "") const;
};

/// A rank's answer to the question whether it has begun a collective.
struct Answer {
  bool begun = false;
  std::string doing;           // e.g. "in AllReduce 'n' (tag 3)"
  uint64_t awaited = kNobody;  // the rank for which it waits there
};

/// E.g. "1.5 s".
std::string Seconds(double seconds);

/// Returns a text about the ranks that are missing, e.g. "rank 2 has not joined the world within 5
/// s".
std::string DescribeAbsent(const std::vector<Member>& members, double seconds);

/// Returns a text about the ranks that have not left an interrupted run.
std::string DescribeUnready(const std::vector<Member>& members, double seconds);

/// Returns a text about a rank that disagrees with `rank` about a collective in which both wait;
/// none if no rank does.
std::optional<std::string> FindDisagreement(const std::vector<Member>& members, int rank);

/// Returns a text about a rank that left the world before a collective in which `rank` waits;
/// none if no rank did.
std::optional<std::string> FindDeserter(const std::vector<Member>& members, int rank);

/// Returns a text about the ranks that delay the collective of `report`. `answers` are the replies
/// of ranks to the question of `server`.
std::string DescribeOverdue(const std::vector<Member>& members, const Report& report, int reporter,
                            const std::map<int, Answer>& answers, double seconds,
                            const std::string& server);

}  // namespace onnxpar
