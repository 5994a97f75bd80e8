#include "diagnosis.h"

#include <algorithm>
#include <cstdio>

namespace onnxpar {
namespace {

std::string Joined(const std::vector<std::string>& clauses) {
  std::string text;
  for (const std::string& clause : clauses) text += (text.empty() ? "" : "; ") + clause;
  return text;
}

/// The most "rank x waits for rank y" that one error lists.
constexpr size_t kMostWaits = 4;

/// Returns texts "rank x waits for rank y", at most kMostWaits; `awaited` maps x to y. If some of
/// these pairs are on two hosts, returns only those.
std::vector<std::string> Waits(const std::vector<Member>& members,
                               const std::map<int, uint64_t>& awaited) {
  std::vector<std::string> between, inside;
  for (const auto& [rank, other] : awaited) {
    if (other >= members.size() || static_cast<int>(other) == rank) continue;
    const bool same = members[rank].host == members[other].host;
    (same ? inside : between)
        .push_back(members[rank].Name() + " waits for " + members[other].Name());
  }
  std::vector<std::string> all = between.empty() ? inside : between;
  all.resize(std::min(all.size(), kMostWaits));
  return all;
}

size_t IndexOf(const std::vector<int>& ranks, int rank) {
  return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

/// Returns a text if, in a collective, rank `from` sends to rank `to` another number of elements
/// than `to` expects; `sender` and `receiver` are their reports. Else returns none.
std::optional<std::string> FindUnequalMessage(const Member& from, const Report& sender,
                                              const Member& to, const Report& receiver) {
  if (sender.sends.empty() || receiver.receives.empty()) return std::nullopt;
  const int64_t sent = sender.sends[IndexOf(sender.ranks, to.rank)];
  const int64_t expected = receiver.receives[IndexOf(receiver.ranks, from.rank)];
  if (sent == expected) return std::nullopt;
  return "the ranks disagree on " + sender.name + ": " + from.Name() + " sends " +
         std::to_string(sent) + " to " + to.Name() + ", which expects " + std::to_string(expected);
}

/// Returns a text if the report `x` of rank `a` and the report `y` of rank `b`, both of one stream,
/// contradict each other; else none.
std::optional<std::string> FindDisagreement(const Member& a, const Report& x, const Member& b,
                                            const Report& y) {
  if (x.ranks != y.ranks || x.run != y.run) return std::nullopt;
  if (x.signature != y.signature) {
    return "the ranks disagree: " + a.Name() + " runs " + x.description + ", " + b.Name() +
           " runs " + y.description;
  }
  const auto forth = FindUnequalMessage(a, x, b, y);
  return forth ? forth : FindUnequalMessage(b, y, a, x);
}

std::optional<std::string> FindDisagreement(const Member& a, const Member& b) {
  for (const auto& [stream, report] : a.waiting) {
    const auto other = b.waiting.find(stream);
    if (other == b.waiting.end()) continue;
    if (auto found = FindDisagreement(a, report, b, other->second)) return found;
  }
  return std::nullopt;
}

/// Returns a text about a rank that left the world before it began the collective of `report`; none
/// if all members have begun it or are still in the world.
std::optional<std::string> FindDeserter(const std::vector<Member>& members, const Report& report) {
  for (int other : report.ranks) {
    if (members[other].state != Member::State::kLeft) continue;
    const auto ran = members[other].ran.find({report.ranks, report.stream});
    if (ran != members[other].ran.end() && ran->second > report.run) continue;
    return members[other].Left(" before " + report.name);
  }
  return std::nullopt;
}

}  // namespace

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

std::string Member::Left(const std::string& before) const {
  return Name() + " left the world" + before + (why.empty() ? "" : ": " + why);
}

std::string Member::Name() const {
  const std::string where = names_host && !host.empty() ? " on " + host : "";
  return "rank " + std::to_string(rank) + (process.empty() ? "" : " (" + process + where + ")");
}

std::string DescribeAbsent(const std::vector<Member>& members, double seconds) {
  std::vector<std::string> absent;
  for (const Member& member : members) {
    if (member.state == Member::State::kAbsent) {
      absent.push_back(member.Name() + " has not joined the world within " + Seconds(seconds));
    }
  }
  return Joined(absent);
}

std::string DescribeUnready(const std::vector<Member>& members, double seconds) {
  std::vector<std::string> late;
  for (const Member& member : members) {
    if (member.is_ready) continue;
    late.push_back(member.Name() + " has not left the run that failed within " + Seconds(seconds));
  }
  return Joined(late);
}

std::optional<std::string> FindDisagreement(const std::vector<Member>& members, int rank) {
  const Member& member = members[rank];
  for (const Member& other : members) {
    if (other.rank == rank) continue;
    // Passes the lower rank first, so that the text does not depend on which rank reports first.
    const auto found =
        rank < other.rank ? FindDisagreement(member, other) : FindDisagreement(other, member);
    if (found) return found;
  }
  return std::nullopt;
}

std::optional<std::string> FindDeserter(const std::vector<Member>& members, int rank) {
  for (const auto& [stream, report] : members[rank].waiting) {
    if (const auto found = FindDeserter(members, report)) return found;
  }
  return std::nullopt;
}

std::string DescribeOverdue(const std::vector<Member>& members, const Report& report, int reporter,
                            const std::map<int, Answer>& answers, double seconds,
                            const std::string& server) {
  std::map<int, uint64_t> awaited = {{reporter, report.awaited}};
  for (const auto& [rank, answer] : answers) awaited[rank] = answer.awaited;
  std::vector<std::string> late;
  bool silent = false;
  for (int rank : report.ranks) {
    if (rank == reporter) continue;
    const auto answer = answers.find(rank);
    if (answer == answers.end()) {
      silent = true;
      late.push_back(members[rank].Name() + " does not respond to " + server +
                     ": it is stopped, its host is gone, or the link between the two is cut");
    } else if (!answer->second.begun) {
      late.push_back(members[rank].Name() + " has not arrived, it is " + answer->second.doing);
    }
  }
  if (late.empty()) late.push_back("all its ranks have arrived, but their messages have not");
  if (!silent) {
    for (std::string& wait : Waits(members, awaited)) late.push_back(std::move(wait));
  }
  return report.name + " has waited for " + Seconds(seconds) + ": " + Joined(late);
}

}  // namespace onnxpar
