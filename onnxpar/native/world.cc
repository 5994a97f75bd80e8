#include "world.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <utility>

#include "hash.h"
#include "message_transport.h"

namespace onnxpar {
namespace {

using std::chrono::milliseconds;

/// A rank reports to the hub each collective that takes longer; the hub compares the members'
/// collectives.
constexpr milliseconds kSlow{20};
/// How long to wait until the hub sends the reason of a failure; the hub may ask other ranks first.
constexpr milliseconds kVerdictTime{2000};

std::mutex worlds_mutex;
std::atomic<pid_t> process{0};  // the process that joined the worlds

std::map<std::string, std::shared_ptr<World>>& Worlds() {
  static auto* worlds = new std::map<std::string, std::shared_ptr<World>>;  // outlives all threads
  return *worlds;
}

/// Leaves all worlds when the process ends, so that other ranks can distinguish the end from a
/// crash. Does nothing in a forked child.
void LeaveWorldsAtExit() {
  if (getpid() != process) return;
  std::lock_guard<std::mutex> lock(worlds_mutex);
  for (const auto& [id, world] : Worlds()) world->LeaveAtExit();
}

/// Makes a write to a socket whose other end is closed return an error instead of ending the
/// process; Gloo may write to such sockets.
void IgnoreBrokenPipes() {
  struct sigaction action{};
  sigaction(SIGPIPE, nullptr, &action);
  if (action.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

void CheckConfig(const WorldConfig& config) {
  if (config.size < 1 || config.rank < 0 || config.rank >= config.size) {
    throw std::runtime_error("rank " + std::to_string(config.rank) + " is not in a world of " +
                             std::to_string(config.size) + " ranks");
  }
  if (config.timeout.count() <= 0) throw std::runtime_error("the timeout must be above 0");
  if (config.bind_address == "0.0.0.0" || config.bind_address == "::") {
    throw std::runtime_error("bind address " + config.bind_address +
                             " is not an address that other ranks can reach; give this host's own");
  }
}

}  // namespace

std::string Operation::Describe() const {
  return name + " over ranks " + ToText(group.ranks) + " on " + TypeName(type) + ToText(shape) +
         (details.empty() ? "" : " with ") + details;
}

std::shared_ptr<World> World::Create(const WorldConfig& config) {
  CheckConfig(config);
  if (Find(config.id))
    throw std::runtime_error("this process already has a world '" + config.id + "'");
  static const bool at_exit [[maybe_unused]] = std::atexit(LeaveWorldsAtExit) == 0;
  process = getpid();
  auto world = std::make_shared<World>(config);
  std::lock_guard<std::mutex> lock(worlds_mutex);
  Worlds()[config.id] = world;
  return world;
}

std::shared_ptr<World> World::Find(const std::string& id) {
  std::lock_guard<std::mutex> lock(worlds_mutex);
  const auto found = Worlds().find(id);
  return found == Worlds().end() ? nullptr : found->second;
}

bool World::Destroy(const std::string& id) {
  std::shared_ptr<World> world;
  {
    std::lock_guard<std::mutex> lock(worlds_mutex);
    const auto found = Worlds().find(id);
    if (found == Worlds().end()) return false;
    world = std::move(found->second);
    Worlds().erase(found);
  }
  world->Close();
  return true;
}

World::World(const WorldConfig& config) : config_(config) {
  IgnoreBrokenPipes();
  if (config.size > 1) Connect();
}

World::~World() { Close(); }

void World::Connect() {
  control_ = std::make_shared<Control>(config_.rank, config_.size, config_.store,
                                       config_.bind_address, config_.timeout, *this);
  try {
    std::shared_ptr<Transport> transport = NewTransport(*control_);
    std::lock_guard<std::mutex> lock(mutex_);
    transport_ = std::move(transport);
  } catch (const std::exception& error) {
    const std::string reason =
        "rank " + std::to_string(rank()) + " cannot connect to the others: " + error.what();
    control_->Abort(reason);
    control_.reset();  // ends its thread, too, which sets failure_
    throw std::runtime_error(failure_.empty() ? reason : failure_);
  }
}

std::shared_ptr<Transport> World::NewTransport(Control& control) {
  return ConnectRanks(config_.rank, config_.size, control, config_.bind_address, config_.timeout);
}

std::shared_ptr<Control> World::Channel() {
  std::lock_guard<std::mutex> lock(mutex_);
  return control_;
}

Group& World::GroupOf(const std::vector<int64_t>& ranks) {
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
  std::unique_ptr<Group>& group = groups_[members];
  if (!group) {
    group = std::make_unique<Group>();
    group->ranks = members;
    group->me = static_cast<int>(me - members.begin());
    group->hash = Mix(0, members);
  }
  return *group;
}

bool World::SharesMemoryWith(int other) {
  if (other < 0 || other >= size()) {
    throw std::runtime_error("the world has no rank " + std::to_string(other));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return transport_ != nullptr && transport_->SharesMemoryWith(other);
}

uint64_t World::Enter(const Operation& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw WorldFailure(FailureOf(operation));
  running_ = &operation;
  began_ = Clock::now();
  reported_ = false;
  Group& group = operation.group;
  return Mix(Mix(group.hash, group.runs++), operation.signature);
}

void World::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  running_ = nullptr;
}

void World::Fail(const Operation& operation, const std::string& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool overdue = Clock::now() - began_ >= config_.timeout;
  if (failure_.empty() && !control_->ended()) {
    const Report report = ReportOf(operation);
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
                          "stopped, or its host is gone";
    control_->Abort("rank " + std::to_string(rank()) + " failed in " + operation.name + ": " +
                    failure_);
  }
  throw WorldFailure(FailureOf(operation));
}

std::string World::FailureOf(const Operation& operation) const {
  const bool named = failure_.compare(0, operation.name.size(), operation.name) == 0;
  return named ? failure_ : operation.name + ": " + failure_;
}

Report World::ReportOf(const Operation& operation) const {
  Report report;
  report.epoch = epoch_;
  report.ranks = operation.group.ranks;
  report.run = operation.group.runs - 1;
  report.signature = operation.signature;
  if (operation.sends != nullptr) report.sends = *operation.sends;
  if (operation.receives != nullptr) report.receives = *operation.receives;
  report.name = operation.name;
  report.description = operation.Describe();
  return report;
}

void World::Reject(const std::string& name, const std::string& reason) {
  const std::string text = "rank " + std::to_string(rank()) + " cannot run " + name + ": " + reason;
  Interrupt(text);
  throw WorldFailure(text);
}

void World::Abort(const std::string& message) {
  const std::string text = "aborted by rank " + std::to_string(rank()) + ": " + message;
  if (const auto control = Channel()) control->Abort(text);
  OnFailure(text);
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
  background_.Await();  // what was started fails at once, because the run was interrupted
  std::lock_guard<std::mutex> no_collective_runs(run_mutex_);
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
  // All ranks report this reason, even if a rank ends now and breaks the others' connections: then
  // the next call fails with that.
  const std::string reason = interruption_;
  if (is_for_good_) return reason;
  std::shared_ptr<Transport> left = std::move(transport_);
  lock.unlock();
  left.reset();
  try {
    left = NewTransport(*control);
  } catch (const std::exception& error) {
    const std::string text =
        "rank " + std::to_string(rank()) + " cannot connect to the others again: " + error.what();
    control->Abort(text);
    OnFailure(text);
    return reason;
  }
  lock.lock();
  transport_ = left;
  if (!failure_.empty()) left->Abort();  // another rank has already failed in the new run
  return reason;
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
  for (const auto& [ranks, group] : groups_) group->runs = 0;
  changed_.notify_all();
}

void World::Stop(const std::string& reason, bool for_good) {
  std::shared_ptr<Transport> transport;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_for_good_ || (!for_good && !failure_.empty())) return;
    failure_ = reason;
    is_for_good_ = for_good;
    changed_.notify_all();
    transport = transport_;
  }
  if (transport) transport->Abort();
}

std::optional<Report> World::NewlySlow() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (running_ == nullptr || reported_ || Clock::now() - began_ < kSlow) return std::nullopt;
  reported_ = true;
  return ReportOf(*running_);
}

Answer World::HasBegun(const std::vector<int>& ranks, uint64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto group = groups_.find(ranks);
  Answer answer;
  answer.begun = group != groups_.end() && group->second->runs > run;
  answer.doing = running_ == nullptr ? "not in a collective" : "in " + running_->Describe();
  return answer;
}

std::map<std::vector<int>, uint64_t> World::Runs() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::vector<int>, uint64_t> runs;
  for (const auto& [ranks, group] : groups_) runs[ranks] = group->runs;
  return runs;
}

void World::Close() {
  OnFailure("this rank has left the world");
  background_.Await();
  std::lock_guard<std::mutex> no_collective_runs(run_mutex_);
  std::shared_ptr<Control> control = Channel();
  if (!control) return;
  control->Leave(Runs());
  std::shared_ptr<Transport> transport;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    control_.reset();
    transport = std::move(transport_);
  }
}

void World::LeaveAtExit() {
  const std::shared_ptr<Control> control = Channel();
  if (!control) return;
  control->Leave(Runs());
  control->StopHub();
}

}  // namespace onnxpar
