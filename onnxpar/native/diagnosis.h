// How the hub finds out from the ranks' reports why a collective does not end: pure functions of
// the states of all ranks, which return texts for the user.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "messages.h"

namespace onnxpar {

/// What the hub knows about one rank.
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

  /// Returns e.g. "rank 2 (pid 4711)", or "rank 2 (pid 4711 on b)" if the ranks are on several
  /// hosts.
  std::string Name() const;
  /// Returns e.g. "rank 2 (pid 4711) left the world", followed by `before` (e.g. " before ...") and
  /// by the reason why it left.
  std::string Left(const std::string& before = "") const;
};

/// A rank's answer to the question whether it has begun a collective.
struct Answer {
  bool begun = false;
  std::string doing;           // e.g. "in AllReduce 'n' (tag 3)"
  uint64_t awaited = kNobody;  // the rank for which it waits there
};

/// Returns a duration as text, e.g. "1.5 s".
std::string Seconds(double seconds);

/// Returns a text about the ranks that are missing, e.g. "rank 2 has not joined the world within 5
/// s".
std::string DescribeAbsent(const std::vector<Member>& members, double seconds);

/// Returns a text about the ranks that have not left an interrupted run within `seconds`.
std::string DescribeUnready(const std::vector<Member>& members, double seconds);

/// Returns a text about a rank that disagrees with `rank`: both wait in the collective with the
/// same number of the same group, but with another op, other parameters or other amounts; none if
/// there is no such rank.
std::optional<std::string> FindDisagreement(const std::vector<Member>& members, int rank);

/// Returns a text about a rank that has left the world without beginning a collective in which
/// `rank` waits; none if there is no such rank.
std::optional<std::string> FindDeserter(const std::vector<Member>& members, int rank);

/// Returns a text about the ranks that delay a collective: `report` is what rank `reporter` has
/// sent about it, `answers` what the other members replied when asked whether they have begun it,
/// `seconds` the timeout, and `server` the process that serves the hub.
std::string DescribeOverdue(const std::vector<Member>& members, const Report& report, int reporter,
                            const std::map<int, Answer>& answers, double seconds,
                            const std::string& server);

}  // namespace onnxpar
