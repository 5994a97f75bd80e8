#include "world.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "hash.h"

namespace onnxpar {
namespace {

using std::chrono::milliseconds;

/// The time after which a rank reports its collective to the hub, which compares it with those of
/// the other members.
constexpr milliseconds kSlow{20};
/// How long to wait for the hub's reason of a failure. The hub may ask other ranks first.
constexpr milliseconds kVerdictTime{2000};

/// Ignores SIGPIPE, unless the program handles it: a write to a socket whose other end is closed
/// then returns an error instead of ending the process. Gloo may write to such sockets.
void IgnoreBrokenPipes() {
  struct sigaction action{};
  sigaction(SIGPIPE, nullptr, &action);
  if (action.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

}  // namespace

World::World(const WorldConfig& config) : config_(config) {
  IgnoreBrokenPipes();
  streams_.push_back(std::make_unique<Stream>());
  if (config.size > 1) Connect();
}

World::~World() { Close(); }

void World::Connect() {
  control_ = std::make_shared<Control>(config_.rank, config_.size, config_.store,
                                       config_.bind_address, config_.timeout, *this);
  try {
    link_ = SlowLinkFromEnvironment();
    std::shared_ptr<Transport> transport = NewTransport(*control_, 0);
    std::lock_guard<std::mutex> lock(mutex_);
    streams_[0]->transport = std::move(transport);
  } catch (const std::exception& error) {
    const std::string reason =
        "rank " + std::to_string(rank()) + " cannot connect to the others: " + error.what();
    control_->Abort(reason);
    control_->StopHub();  // which tells the other ranks first, because this process may end now
    control_.reset();     // ends its thread, too, which sets failure_
    throw std::runtime_error(failure_.empty() ? reason : failure_);
  }
}

std::shared_ptr<Control> World::Channel() {
  std::lock_guard<std::mutex> lock(mutex_);
  return control_;
}

Group& World::GroupOf(const std::vector<int64_t>& ranks, int64_t stream) {
  if (stream < 0 || stream >= static_cast<int64_t>(kMaxStreams)) {
    throw std::runtime_error("stream=" + std::to_string(stream) + " must be from 0 to " +
                             std::to_string(kMaxStreams - 1));
  }
  std::vector<int> members(ranks.begin(), ranks.end());
  for (int each = 0; ranks.empty() && each < size(); ++each) members.push_back(each);
  const std::string name = "group " + ToText(members);
  for (int member : members) {
    if (member >= 0 && member < size()) continue;
    throw std::runtime_error(name + " names rank " + std::to_string(member) +
                             ", but the world has ranks 0 to " + std::to_string(size() - 1));
  }
  if (std::set<int>(members.begin(), members.end()).size() != members.size()) {
    throw std::runtime_error(name + " names a rank twice");
  }
  const auto me = std::find(members.begin(), members.end(), rank());
  if (me == members.end()) {
    throw std::runtime_error(name + " does not name this rank, " + std::to_string(rank()) +
                             "; is this the graph of another rank?");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Group>& group = groups_[{members, stream}];
  if (!group) {
    group = std::make_unique<Group>();
    group->ranks = members;
    group->stream = static_cast<uint64_t>(stream);
    group->me = static_cast<int>(me - members.begin());
    group->hash = Mix(Mix(0, members), group->stream);
  }
  return *group;
}

bool World::SharesMemoryWith(int other) {
  if (other < 0 || other >= size()) {
    throw std::runtime_error("the world has no rank " + std::to_string(other));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const auto& transport = streams_[0]->transport;
  return transport != nullptr && transport->SharesMemoryWith(other);
}

uint64_t World::Enter(Stream& stream, const Operation& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw WorldFailure(FailureOf(operation));
  stream.running = &operation;
  stream.began = Clock::now();
  stream.reported = false;
  Group& group = operation.group;
  return Mix(Mix(group.hash, group.runs++), operation.signature);
}

void World::Leave(Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  stream.running = nullptr;
}

void World::Fail(const Stream& stream, const Operation& operation, const std::string& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool overdue = Clock::now() - stream.began >= config_.timeout;
  if (failure_.empty() && !control_->ended()) {
    const Report report = ReportOf(stream, operation);
    overdue ? control_->Overdue(report) : control_->Waiting(report);
    changed_.wait_for(lock, kVerdictTime, [&] { return !failure_.empty(); });
  }
  if (failure_.empty()) {
    const std::string& host = control_->host();
    is_for_good_ = true;
    failure_ = (overdue ? "waited in vain for " : "lost the connection to ") + error;
    failure_ += control_->ended()
                    ? "; the cause is unknown, because " + host +
                          ", which served the control channel, has left"
                    : "; " + host + ", which serves the control channel, does not respond: it is " +
                          "stopped, its host is gone, or its link to rank " +
                          std::to_string(rank()) + " on host " + HostName() + " is cut";
    control_->Abort("rank " + std::to_string(rank()) + " failed in " + operation.name + ": " +
                    failure_);
  }
  throw WorldFailure(FailureOf(operation));
}

std::string World::FailureOf(const Operation& operation) const {
  const bool named = failure_.compare(0, operation.name.size(), operation.name) == 0;
  return named ? failure_ : operation.name + ": " + failure_;
}

Report World::ReportOf(const Stream& stream, const Operation& operation) const {
  Report report;
  report.epoch = epoch_;
  report.ranks = operation.group.ranks;
  report.stream = operation.group.stream;
  report.run = operation.group.runs - 1;
  report.signature = operation.signature;
  if (operation.sends != nullptr) report.sends = *operation.sends;
  if (operation.receives != nullptr) report.receives = *operation.receives;
  report.name = operation.name;
  report.description = operation.Describe();
  report.awaited = AwaitedIn(stream);
  return report;
}

/// Returns the rank for which this rank waits in a stream; kNobody if for none.
uint64_t World::AwaitedIn(const Stream& stream) {
  const int other = stream.transport ? stream.transport->Awaited() : -1;
  return other < 0 ? kNobody : static_cast<uint64_t>(other);
}

void World::Reject(const std::string& name, const std::string& reason) {
  const std::string text = "rank " + std::to_string(rank()) + " cannot run " + name + ": " + reason;
  Interrupt(text);
  throw WorldFailure(text);
}

void World::Abort(const std::string& message) {
  if (const auto control = Channel()) control->Abort(message);
  OnFailure(message);
}

void World::Begin() {
  std::string failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++call_;
    failure = std::move(next_failure_);
    next_failure_.clear();
  }
  if (!failure.empty()) Stop(failure, /*for_good=*/false);
}

void World::Interrupt(const std::string& message) {
  uint64_t epoch = 0, call = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    epoch = epoch_;
    call = call_;
  }
  if (const auto control = Channel()) control->Interrupt(epoch, call, message);
  OnInterrupt(epoch, call, message);
}

std::string World::Renew() {
  const std::vector<Stream*> streams = Streams();
  const auto stopped = Stopped(streams);  // fails at once, because the run was interrupted
  const std::shared_ptr<Control> control = Channel();
  if (!control) {
    OnRenewed(epoch_ + 1, failure_);
    return interruption_;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t next = epoch_ + 1;
  if (!is_for_good_) {
    control->Ready(epoch_);
    changed_.wait_for(lock, config_.timeout + kVerdictTime,
                      [&] { return epoch_ == next || is_for_good_; });
  }
  if (epoch_ != next) {
    if (!is_for_good_) {
      is_for_good_ = true;
      failure_ = control->host() + ", which serves the control channel, does not respond";
    }
    throw WorldFailure(failure_);
  }
  // All ranks report this reason, even if a rank ends now and breaks the connections of others:
  // then the next call fails with the later reason.
  const std::string reason = interruption_;
  if (is_for_good_) return reason;
  std::vector<std::shared_ptr<Transport>> transports;
  for (Stream* stream : streams) transports.push_back(std::move(stream->transport));
  lock.unlock();
  try {
    for (auto& each : transports) each.reset();
    for (size_t i = 0; i < streams.size(); ++i) transports[i] = NewTransport(*control, i);
  } catch (const std::exception& error) {
    const std::string text =
        "rank " + std::to_string(rank()) + " cannot connect to the others again: " + error.what();
    control->Abort(text);
    OnFailure(text);
    return reason;
  }
  lock.lock();
  for (size_t i = 0; i < streams.size(); ++i) {
    streams[i]->transport = transports[i];
    if (!failure_.empty()) transports[i]->Abort();  // another rank has failed in the new run
  }
  return reason;
}

std::string World::Failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_for_good_ ? failure_ : "";
}

void World::Explain(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  explanation_ = why;
}

std::string World::Explanation() {
  std::lock_guard<std::mutex> lock(mutex_);
  return explanation_;
}

void World::OnFailure(const std::string& reason) { Stop(reason, /*for_good=*/true); }

void World::OnInterrupt(uint64_t epoch, uint64_t call, const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (epoch != epoch_) return;
    if (call > call_) {
      next_failure_ = reason;
      return;
    }
  }
  Stop(reason, /*for_good=*/false);
}

void World::OnRenewed(uint64_t epoch, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_for_good_ || epoch != epoch_ + 1) return;
  epoch_ = epoch;
  interruption_ = reason;
  failure_.clear();
  next_failure_.clear();
  for (const auto& [id, group] : groups_) group->runs = 0;
  changed_.notify_all();
}

void World::Stop(const std::string& reason, bool for_good) {
  std::vector<std::shared_ptr<Transport>> transports;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_for_good_ || (!for_good && !failure_.empty())) return;
    failure_ = reason;
    is_for_good_ = for_good;
    changed_.notify_all();
    for (const auto& stream : streams_) transports.push_back(stream->transport);
  }
  for (const auto& transport : transports) {
    if (transport) transport->Abort();
  }
}

std::vector<Report> World::NewlySlow() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Report> slow;
  for (const auto& stream : streams_) {
    if (stream->running == nullptr || stream->reported) continue;
    if (Clock::now() - stream->began < kSlow) continue;
    stream->reported = true;
    slow.push_back(ReportOf(*stream, *stream->running));
  }
  return slow;
}

Answer World::HasBegun(const GroupId& id, uint64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto group = groups_.find(id);
  Answer answer;
  answer.begun = group != groups_.end() && group->second->runs > run;
  for (const auto& stream : streams_) {
    if (stream->running == nullptr) continue;
    if (stream->running->group.ranks == id.first) answer.awaited = AwaitedIn(*stream);
    answer.doing += (answer.doing.empty() ? "in " : " and in ") + stream->running->Describe();
  }
  if (answer.doing.empty()) answer.doing = "not in a collective";
  return answer;
}

onnxpar::Runs World::Runs() {
  std::lock_guard<std::mutex> lock(mutex_);
  onnxpar::Runs runs;
  for (const auto& [id, group] : groups_) runs[id] = group->runs;
  return runs;
}

void World::Close() {
  OnFailure("this rank has left the world");
  const std::vector<Stream*> streams = Streams();
  const auto stopped = Stopped(streams);
  std::shared_ptr<Control> control = Channel();
  if (!control) return;
  control->Leave(Runs(), Explanation());
  std::vector<std::shared_ptr<Transport>> transports;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    control_.reset();
    for (Stream* stream : streams) transports.push_back(std::move(stream->transport));
  }
}

void World::LeaveAtExit() {
  const std::shared_ptr<Control> control = Channel();
  if (!control) return;
  control->Leave(Runs(), Explanation());
  control->StopHub();
}

}  // namespace onnxpar
