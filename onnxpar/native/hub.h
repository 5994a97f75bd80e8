// The hub of a world: the one place that all ranks are connected to apart from the data.
#pragma once

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "diagnosis.h"
#include "wire.h"

namespace onnxpar {

/// Serves one world: waits for its ranks, keeps the keys and values through which they find each
/// other, and informs all ranks when one has died, left, or disagrees with another.
class Hub {
 public:
  /// Listens on `address`. `key`, which a rank's hello must have, keeps strangers out; `host_rank`
  /// is the rank whose process this is, or -1. The hub ends with its last member, or by Stop.
  static std::shared_ptr<Hub> Start(Address address, std::string key, int host_rank);
  ~Hub();

  const Address& address() const { return address_; }
  const std::string& key() const { return key_; }

  /// Takes leave of the ranks in good order and returns when that is done.
  void Stop();

 private:
  using Clock = std::chrono::steady_clock;

  /// A connection: a stranger's, and a rank's once its hello has been accepted.
  struct Peer {
    Connection connection;
    int rank = -1;
    Clock::time_point until;       // for a hello
    bool is_refused = false;       // it is dropped after it has got the reason
    bool is_distrusted = false;    // it has sent a malformed message
    std::set<std::string> wanted;  // keys that it waits for
    size_t stored = 0;             // bytes of its values
  };

  struct Stored {
    std::string value;
    int owner = 0;
  };

  /// The ranks asked about an overdue collective, and their answers.
  struct Inquiry {
    uint64_t question = 0;
    Report report;
    int reporter = 0;
    std::set<int> asked;
    std::map<int, Answer> answers;
    Clock::time_point until;
  };

  Hub(Address address, std::string key, int host_rank);

  void Serve();
  void ServeUntilTheEnd();
  void TakeLeave();
  void TellTheEnd(const std::string& reason) noexcept;
  bool Ended() const;
  void Poll(std::chrono::milliseconds timeout);
  std::chrono::milliseconds UntilDeadline() const;
  void ForgetClosed();
  void AcceptNext();
  Peer* OldestStranger();
  void Read(Peer& peer);
  void Distrust(Peer& peer, const std::string& what);
  void Handle(Peer& peer, const Frame& frame);
  void HandleRank(Peer& peer, const Frame& frame);
  void HandleHello(Peer& peer, const Frame& frame);
  std::string WhyRefused(const messages::Hello& hello, bool* again) const;
  void Begin(const messages::Hello& hello);
  void WelcomeIfComplete();
  void HandleSet(Peer& peer, messages::Set set);
  void HandleGet(Peer& peer, const std::string& key);
  void HandleWaiting(int rank, Report report);
  void HandleOverdue(int rank, Report report);
  void HandleStatus(int rank, const messages::Status& status);
  void HandleInterrupt(const messages::Interrupt& interrupt);
  void HandleReady(int rank, uint64_t epoch);
  void RenewOnceReady();
  void ConcludeInquiry();
  void HandleLeave(int rank, Runs runs);
  void Lose(Peer& peer, const std::string& how);
  void CheckDeadlines();
  Peer* PeerOf(int rank);
  bool IsCurrent(const Report& report) const;
  void Fail(const std::string& message);
  void Refuse(Peer& peer, const std::string& message, bool again);

  template <typename Message>
  void Tell(const Message& message) {
    for (const auto& peer : peers_) {
      if (peer->rank >= 0 && peer->connection.open()) peer->connection.Send(message);
    }
  }

  Address address_;
  const std::string key_;
  const int host_rank_;
  int listener_ = -1;
  int wake_ = -1;
  std::atomic<bool> stop_{false};
  std::promise<void> ended_;
  std::shared_future<void> end_{ended_.get_future()};

  // Only the hub's thread touches the rest.
  std::vector<std::unique_ptr<Peer>> peers_;  // in the order in which they came
  bool is_starved_ = false;                   // no descriptor was left for the last one
  Clock::time_point accept_from_;             // time to accept new ones again
  std::vector<Member> members_;
  std::map<std::string, Stored> values_;
  Clock::time_point join_until_;
  double timeout_seconds_ = 0;
  bool welcomed_ = false;
  std::string failure_;
  uint64_t epoch_ = 0;                            // how many runs were interrupted
  std::optional<std::string> interruption_;       // why the run of this epoch ended, if it did
  std::optional<Clock::time_point> ready_until_;  // deadline for all ranks to leave it
  uint64_t questions_ = 0;
  std::unique_ptr<Inquiry> inquiry_;
};

}  // namespace onnxpar
