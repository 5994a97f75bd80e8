// A rank's connection to the hub of its world.
#pragma once

#include <gloo/rendezvous/store.h>

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
#include "rendezvous.h"
#include "wire.h"

namespace onnxpar {

/// The world that a control channel serves. Called on the channel's thread.
class ControlListener {
 public:
  virtual ~ControlListener() = default;
  /// The world has failed for good.
  virtual void OnFailure(const std::string& reason) = 0;
  /// A rank cannot continue this call of this epoch.
  virtual void OnInterrupt(uint64_t epoch, uint64_t call, const std::string& reason) = 0;
  /// All ranks have left that run, and an epoch begins; `reason` is why the last one ended.
  virtual void OnRenewed(uint64_t epoch, const std::string& reason) = 0;
  /// The collective in flight, if it has become slow and was not reported before.
  virtual std::optional<Report> NewlySlow() = 0;
  virtual Answer HasBegun(const std::vector<int>& ranks, uint64_t run) = 0;
};

/// The control channel of one rank, and the store through which Gloo finds the other ranks.
class Control : public gloo::rendezvous::Store {
 public:
  /// Returns once all ranks have joined; throws within the timeout. Rank 0 also serves the hub,
  /// unless another process does so at a tcp:// store. `listener` must outlive this object.
  Control(int rank, int size, const std::string& store, const std::string& bind_address,
          std::chrono::milliseconds timeout, ControlListener& listener);
  ~Control() override;

  /// The process that serves the hub, e.g. "rank 0 (pid 4711)".
  const std::string& host() const { return host_; }

  /// True if the hub ended in good order; failures of other ranks are then no longer noticed.
  bool ended() const { return ended_; }

  /// Reports a collective that does not end to the hub; OnFailure follows if the hub knows why.
  void Waiting(const Report& report) { Send(messages::Waiting{report}); }
  /// The same at the timeout; OnFailure follows.
  void Overdue(const Report& report) { Send(messages::Overdue{report}); }
  /// Fails the world on all ranks, for good.
  void Abort(const std::string& message) { Send(messages::Abort{message}); }
  /// Ends this call on all ranks.
  void Interrupt(uint64_t epoch, uint64_t call, const std::string& message) {
    Send(messages::Interrupt{epoch, call, message});
  }
  /// Tells the hub that this rank has left that run; OnRenewed follows when all have.
  void Ready(uint64_t epoch) { Send(messages::Ready{epoch}); }
  /// Leaves in good order, having begun so many collectives of each group.
  void Leave(const Runs& runs) { Send(messages::Leave{runs}); }
  /// Ends the hub if this process serves it, since the process is about to end.
  void StopHub();

  void set(const std::string& key, const std::vector<char>& data) override;
  std::vector<char> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  using Clock = std::chrono::steady_clock;

  void Join(Rendezvous& rendezvous);
  bool TryJoin(const HubAddress& hub, Clock::time_point until, std::string* error);
  bool AskToJoin(const HubAddress& hub, Clock::time_point until, std::string* error);
  std::optional<Frame> Receive(Clock::time_point until);
  void Serve();
  void ServeUntilTheEnd();
  void Handle(const Frame& frame);
  void HandleValue(messages::Value value);
  void Fail(const std::string& reason);

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

  const std::chrono::milliseconds timeout_;
  ControlListener& listener_;
  std::shared_ptr<Hub> hub_;  // null if another process serves
  std::string host_;
  int wake_ = -1;
  std::atomic<bool> stop_{false};
  std::atomic<bool> ended_{false};  // the hub has said goodbye

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Connection connection_;
  std::set<std::string> wanted_;  // requested keys
  std::map<std::string, std::string> values_;
  std::string failure_;

  std::thread thread_;
};

}  // namespace onnxpar
