// The hub of a world: the one place that all ranks are connected to apart from the data.
#pragma once

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis.h"
#include "wire.h"

namespace onnxpar {

/// Serves one world: gathers its ranks, keeps the keys and values through which they find each
/// other, and tells all of them when one has died, left, or disagrees with another.
class Hub {
 public:
  /// Listens on `address`. `key` keeps strangers out; `host_rank` is the rank whose process this
  /// is, or -1. The hub ends with its last member, or by Stop.
  static std::shared_ptr<Hub> Start(Address address, std::string key, int host_rank);
  ~Hub();

  const Address& address() const { return address_; }
  const std::string& key() const { return key_; }

  /// Takes leave of the ranks in good order and returns when that is done.
  void Stop();

 private:
  using Clock = std::chrono::steady_clock;

  /// A connection, of a rank once its hello has been accepted.
  struct Peer {
    Connection connection;
    int rank = -1;
    std::vector<std::string> wanted;  // keys that it waits for
  };

  /// Who is asked about an overdue collective, and what they said.
  struct Inquiry {
    uint64_t question = 0;
    Report report;
    int reporter = 0;
    size_t asked = 0;
    std::map<int, Answer> answers;
    Clock::time_point until;
  };

  Hub(Address address, std::string key, int host_rank);

  void Serve();
  bool Ended() const;
  void Poll(std::chrono::milliseconds timeout);
  std::chrono::milliseconds UntilDeadline() const;
  void Accept();
  void Read(Peer& peer);
  void Handle(Peer& peer, Fields& fields);
  void HandleHello(Peer& peer, Fields& fields);
  void HandleSet(Fields& fields);
  void HandleGet(Peer& peer, Fields& fields);
  void HandleWaiting(int rank, Fields& fields);
  void HandleOverdue(int rank, Fields& fields);
  void HandleStatus(int rank, Fields& fields);
  void HandleInterrupt(Fields& fields);
  void HandleReady(int rank, Fields& fields);
  void ConcludeInquiry();
  void HandleLeave(int rank, Fields& fields);
  void Lose(Peer& peer);
  void CheckDeadlines();
  Peer* PeerOf(int rank);
  bool IsCurrent(const Report& report) const;
  void Fail(const std::string& message);
  void Tell(const Frame& frame);
  void Refuse(Peer& peer, const std::string& message, bool again);

  Address address_;
  const std::string key_;
  const int host_rank_;
  int listener_ = -1;
  int wake_ = -1;
  std::atomic<bool> stop_{false};
  std::promise<void> ended_;
  std::shared_future<void> end_{ended_.get_future()};

  // Only the hub's thread touches the rest.
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Member> members_;
  std::map<std::string, std::string> values_;
  Clock::time_point join_until_;
  double timeout_seconds_ = 0;
  bool welcomed_ = false;
  std::string failure_;
  uint64_t epoch_ = 0;        // how many runs were interrupted
  std::string interruption_;  // why the run of this epoch has ended, once it has
  std::optional<Clock::time_point> ready_until_;  // for all to leave it, from the first on
  uint64_t questions_ = 0;
  std::unique_ptr<Inquiry> inquiry_;
};

}  // namespace onnxpar
