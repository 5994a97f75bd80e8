// The control channel: a rank's connection to the hub, the process that watches all ranks of a
// world.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "diagnosis.h"
#include "hub.h"
#include "mesh_connections.h"
#include "rendezvous.h"
#include "wire.h"

namespace onnxpar {

/// Handles the events of a rank's control channel; World implements it. All methods are called on
/// the channel's thread.
class ControlListener {
 public:
  virtual ~ControlListener() = default;
  /// The world has failed for good.
  virtual void OnFailure(const std::string& reason) = 0;
  /// A rank cannot continue call number `call` (one run of the model) of epoch `epoch`. An epoch
  /// lasts until a run is interrupted.
  virtual void OnInterrupt(uint64_t epoch, uint64_t call, const std::string& reason) = 0;
  /// All ranks have left the interrupted run, and epoch `epoch` begins. `reason` is why the last
  /// epoch ended.
  virtual void OnRenewed(uint64_t epoch, const std::string& reason) = 0;
  /// Returns a report on each collective of this rank that has become slow since the last question.
  virtual std::vector<Report> NewlySlow() = 0;
  /// Returns whether this rank has begun collective number `run` of a group, and what it does now.
  virtual Answer HasBegun(const GroupId& group, uint64_t run) = 0;
};

/// The control channel of one rank. It is also the store, through which ranks exchange the
/// addresses by which they connect to each other.
class Control : public Store {
 public:
  /// Joins the world, and returns when all ranks have joined; throws if they do not join within
  /// `timeout`. Rank 0 also serves the hub, unless another process already does so at a tcp://
  /// store. If `bind_address` is empty, the rank listens for others at the address from which it
  /// reaches the hub. `listener` must outlive this object.
  Control(int rank, int size, const std::string& store, const std::string& bind_address,
          std::chrono::milliseconds timeout, ControlListener& listener);
  ~Control() override;

  /// Returns the process that serves the hub, e.g. "rank 0 (pid 4711)".
  const std::string& host() const { return host_; }

  /// Returns the addresses by which this rank listens and connects.
  const Network& network() const { return network_; }

  /// True if the hub ended normally; from then on, nothing notices failures of other ranks.
  bool ended() const { return ended_; }

  /// Reports to the hub a collective of this rank that takes longer than usual. If the hub can tell
  /// why (e.g. ranks disagree), it fails the world, and OnFailure follows.
  void Waiting(const Report& report) { Send(messages::Waiting{report}); }
  /// Reports to the hub a collective that has reached the timeout. The hub then fails the world,
  /// and OnFailure follows.
  void Overdue(const Report& report) { Send(messages::Overdue{report}); }
  /// Fails the world on all ranks, permanently.
  void Abort(const std::string& message) { Send(messages::Abort{message}); }
  /// Ends call number `call` of epoch `epoch` on all ranks, with this error message.
  void Interrupt(uint64_t epoch, uint64_t call, const std::string& message) {
    Send(messages::Interrupt{epoch, call, message});
  }
  /// Tells the hub that this rank has left the run whose interruption ended epoch `epoch`.
  /// OnRenewed follows when all ranks have left it.
  void Ready(uint64_t epoch) { Send(messages::Ready{epoch}); }
  /// Tells the hub that this rank leaves the world. `runs` is the number of collectives that it has
  /// begun, by group; `why` is empty unless the rank has failed.
  void Leave(const Runs& runs, const std::string& why) { Send(messages::Leave{why, runs}); }
  /// Ends the hub if it is in this process. Called before the process ends.
  void StopHub();

  void Set(const std::string& key, const std::string& value) override;
  std::string Get(const std::string& key) override;
  void ThrowIfFailed() override;

 private:
  using Clock = std::chrono::steady_clock;

  /// Why an attempt to join has failed, and how far it came. The reason of a later stage explains
  /// more, so it is kept until another attempt reaches the same stage.
  struct Setback {
    enum class Stage { kUnknown, kUnreachable, kAnswered, kJoining };
    Stage stage = Stage::kUnknown;
    std::string why;
  };

  void Join(Rendezvous& rendezvous);
  bool TryJoin(const Address& hub, Clock::time_point until, Setback* setback);
  std::string Listening() const;
  bool Reach(const Address& hub, Setback* setback);
  bool AskToJoin(const Address& hub, Clock::time_point until, Setback* setback);
  std::optional<Frame> Receive(Clock::time_point until);
  void Serve();
  void ServeUntilTheEnd();
  void Handle(const Frame& frame);
  void HandleValue(messages::Value value);
  void Fail(const std::string& reason);
  std::string WhyMissing(const std::string& key) const;

  template <typename Message>
  Message Read(const Frame& frame) const {
    return Decode<Message>(frame, scope_);
  }

  template <typename Message>
  void Send(const Message& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    connection_.Send(message);
  }

  const Scope scope_;
  const std::string bind_address_;
  const std::chrono::milliseconds timeout_;
  ControlListener& listener_;
  std::shared_ptr<Hub> hub_;  // null if another process serves
  std::string host_;
  Network network_;
  int wake_ = -1;
  std::atomic<bool> stop_{false};
  std::atomic<bool> ended_{false};  // the hub has sent Goodbye

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Connection connection_;
  std::set<std::string> wanted_;  // keys that were requested from the hub
  std::map<std::string, std::string> values_;
  std::string failure_;

  std::thread thread_;
};

}  // namespace onnxpar
