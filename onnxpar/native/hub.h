// The hub of a world: a thread, on rank 0 or in a launcher, that watches all ranks. Each rank has a
// control connection to it, separate from the connections for data.
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

#include "acceptor.h"
#include "diagnosis.h"
#include "wire.h"

namespace onnxpar {

/// The name of the hub's service in handshakes; see Handshake::Accepts.
constexpr char kHubPurpose[] = "hub";

/// Serves one world: waits until all ranks have joined, stores the values by which they find each
/// other's addresses, and informs all ranks if a rank dies, leaves too early, or disagrees with
/// another one.
class Hub {
 public:
  /// Starts the hub's thread, which listens on `address`, and accepts connections that prove the
  /// key in `credentials`. `host_rank` is the rank of this process, or -1 if it is no rank. The hub
  /// ends when its last rank leaves, or by Stop.
  static std::shared_ptr<Hub> Start(Address address, Credentials credentials, int host_rank);
  ~Hub();

  const Address& address() const { return address_; }

  /// Tells the ranks that the hub ends normally; returns when it has ended.
  void Stop();

 private:
  using Clock = std::chrono::steady_clock;

  /// A connection whose other end has proved the key. It belongs to a rank once the hub has
  /// accepted the Hello that it sent.
  struct Peer {
    Connection connection;
    int rank = -1;
    Clock::time_point until;       // deadline for its Hello
    bool is_refused = false;       // drop it once the refusal is written
    bool is_distrusted = false;    // has sent a malformed message
    std::set<std::string> wanted;  // the keys that it awaits
    size_t stored = 0;             // bytes of the values it has set
  };

  struct Stored {
    std::string value;
    int owner = 0;
  };

  /// The question to all members of a group whether they have begun an overdue collective, and the
  /// answers so far.
  struct Inquiry {
    uint64_t question = 0;
    Report report;
    int reporter = 0;
    std::set<int> asked;
    std::map<int, Answer> answers;
    Clock::time_point until;
  };

  Hub(Address address, Credentials credentials, int host_rank);

  void Serve();
  void ServeUntilTheEnd();
  void TakeLeave();
  void TellTheEnd(const std::string& reason) noexcept;
  bool Ended() const;
  void Poll(std::chrono::milliseconds timeout);
  std::chrono::milliseconds UntilDeadline() const;
  void ForgetClosed();
  void WelcomeAccepted();
  void Read(Peer& peer);
  void Distrust(Peer& peer, const std::string& what);
  void Handle(Peer& peer, const Frame& frame);
  void HandleRank(Peer& peer, const Frame& frame);
  void HandleHello(Peer& peer, const Frame& frame);
  std::string WhyRefused(const messages::Hello& hello, bool* again) const;
  void Begin(const messages::Hello& hello);
  void WelcomeIfComplete();
  std::string Server() const;
  void HandleSet(Peer& peer, messages::Set set);
  void HandleGet(Peer& peer, const std::string& key);
  void HandleWaiting(int rank, Report report);
  void HandleOverdue(int rank, Report report);
  void HandleStatus(int rank, const messages::Status& status);
  void HandleInterrupt(const messages::Interrupt& interrupt);
  void HandleReady(int rank, uint64_t epoch);
  void RenewOnceReady();
  void ConcludeInquiry();
  void HandleLeave(int rank, messages::Leave leave);
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
  const int host_rank_;
  Acceptor acceptor_;
  int wake_ = -1;
  std::atomic<bool> stop_{false};
  std::promise<void> ended_;
  std::shared_future<void> end_{ended_.get_future()};

  // Only the hub's thread uses the members below.
  std::vector<std::unique_ptr<Peer>> peers_;  // oldest first
  std::vector<Member> members_;
  std::map<std::string, Stored> values_;
  Clock::time_point join_until_;
  double timeout_seconds_ = 0;
  bool welcomed_ = false;
  bool on_several_hosts_ = false;
  std::string failure_;
  uint64_t epoch_ = 0;                            // number of interrupted runs
  std::optional<std::string> interruption_;       // why the run of this epoch was interrupted
  std::optional<Clock::time_point> ready_until_;  // deadline for all ranks to leave that run
  uint64_t questions_ = 0;
  std::unique_ptr<Inquiry> inquiry_;
};

}  // namespace onnxpar
