#include "hub.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <thread>

namespace onnxpar {
namespace {

using std::chrono::milliseconds;

/// How long to wait for ranks' answers whether they have begun a collective. Ranks on busy machines
/// are slow to answer.
constexpr milliseconds kAnswerTime{1000};
/// How long the hub tries to send Goodbye to all ranks before it ends.
constexpr milliseconds kGoodbyeTime{200};
/// How long a new connection may take to send its Hello.
constexpr milliseconds kHelloTime{5000};
/// The most keys for which a rank may wait at a time. Gloo requests keys one after another.
constexpr size_t kMaxWanted = 1024;

/// The bytes that a stored value counts in addition to its key and content.
constexpr size_t kStoredBytes = 128;

/// Returns the most bytes that one rank may store in a world of `ranks` ranks. A rank stores the
/// addresses of its connections to all others.
size_t MaxStored(size_t ranks) { return (size_t{64} << 10) + (size_t{1} << 10) * ranks; }

}  // namespace

std::shared_ptr<Hub> Hub::Start(Address address, Credentials credentials, int host_rank) {
  std::shared_ptr<Hub> hub(new Hub(std::move(address), std::move(credentials), host_rank));
  std::thread([hub] { hub->Serve(); }).detach();
  return hub;
}

Hub::Hub(Address address, Credentials credentials, int host_rank)
    : address_(std::move(address)),
      host_rank_(host_rank),
      acceptor_(&address_, std::move(credentials), kHubPurpose),
      wake_(NewEvent()) {}

Hub::~Hub() { close(wake_); }

void Hub::Stop() {
  stop_ = true;
  eventfd_write(wake_, 1);
  end_.wait();
}

/// The hub's thread. An exception does not end the process; the ranks fail with its message.
void Hub::Serve() {
  try {
    ServeUntilTheEnd();
    TakeLeave();
  } catch (const std::exception& error) {
    TellTheEnd(error.what());
  }
  peers_.clear();
  ended_.set_value();
}

void Hub::TellTheEnd(const std::string& reason) noexcept {
  try {
    Fail("the hub of the world cannot continue: " + reason);
  } catch (const std::exception&) {  // the ranks will notice that the connection ends
  }
}

void Hub::ServeUntilTheEnd() {
  while (!Ended()) {
    Poll(UntilDeadline());
    CheckDeadlines();
  }
}

void Hub::TakeLeave() {
  Poll(milliseconds(0));  // reads messages that the ranks sent before the end
  Tell(messages::Goodbye{});
  const auto until = Clock::now() + kGoodbyeTime;
  while (Clock::now() < until && std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
           return peer->connection.wants_to_write();
         })) {
    Poll(milliseconds(10));
  }
}

bool Hub::Ended() const {
  const bool abandoned =
      welcomed_ && std::none_of(peers_.begin(), peers_.end(), [](const auto& peer) {
        return peer->rank >= 0 && peer->connection.open();
      });
  return stop_ || abandoned;
}

milliseconds Hub::UntilDeadline() const {
  std::vector<Clock::time_point> deadlines;
  if (!members_.empty() && !welcomed_ && failure_.empty()) deadlines.push_back(join_until_);
  if (inquiry_) deadlines.push_back(inquiry_->until);
  if (ready_until_) deadlines.push_back(*ready_until_);
  if (acceptor_.deadline() != Clock::time_point::max()) deadlines.push_back(acceptor_.deadline());
  for (const auto& peer : peers_) {
    if (peer->rank < 0) deadlines.push_back(peer->until);
  }
  if (deadlines.empty()) return milliseconds(-1);
  const auto first = *std::min_element(deadlines.begin(), deadlines.end());
  const auto left = std::chrono::duration_cast<milliseconds>(first - Clock::now());
  return std::max(left + milliseconds(1), milliseconds(0));
}

void Hub::Poll(milliseconds timeout) {
  ForgetClosed();
  std::vector<pollfd> waiting = {{wake_, POLLIN, 0}};
  for (const auto& peer : peers_) {
    const short events = peer->connection.wants_to_write() ? POLLIN | POLLOUT : POLLIN;
    waiting.push_back({peer->connection.descriptor(), events, 0});
  }
  const size_t known = peers_.size();
  acceptor_.Watch(&waiting);
  if (poll(waiting.data(), waiting.size(), PollTime(timeout)) < 0) return;
  for (size_t i = 0; i < known; ++i) {
    Peer& peer = *peers_[i];
    const short events = waiting[i + 1].revents;
    if (events & POLLOUT) peer.connection.Flush();
    if (events & (POLLIN | POLLHUP | POLLERR)) Read(peer);
  }
  for (const auto& peer : peers_) {
    if (peer->connection.overflowed()) Lose(*peer, " does not read its messages");
    if (peer->is_refused && !peer->connection.wants_to_write()) peer->connection.Close();
  }
  acceptor_.Advance(&waiting[known + 1]);
  WelcomeAccepted();
}

void Hub::ForgetClosed() {
  peers_.erase(std::remove_if(peers_.begin(), peers_.end(),
                              [](const auto& peer) { return !peer->connection.open(); }),
               peers_.end());
}

/// Takes over from the acceptor the connections that have proved the key.
void Hub::WelcomeAccepted() {
  while (auto accepted = acceptor_.Next()) {
    auto peer = std::make_unique<Peer>();
    peer->connection = Connection(std::move(accepted->socket));
    peer->until = Clock::now() + kHelloTime;
    peers_.push_back(std::move(peer));
  }
}

void Hub::Read(Peer& peer) {
  const bool open = peer.connection.Fill();
  while (peer.connection.open() && !peer.is_refused) {
    try {
      const auto frame = peer.connection.Next();
      if (!frame) break;
      Handle(peer, *frame);
    } catch (const ProtocolError& error) {
      Distrust(peer, error.what());
    }
  }
  if (!open) Lose(peer, " died");
}

/// Reacts to a malformed message: drops the connection if it belongs to no rank yet, and ignores
/// the message of a rank. The world continues; a collective that needed the message fails by
/// itself.
void Hub::Distrust(Peer& peer, const std::string& what) {
  if (peer.rank < 0) return peer.connection.Close();
  if (peer.is_distrusted) return;
  peer.is_distrusted = true;
  std::fprintf(stderr, "onnxpar: %s has sent a malformed message, which is ignored: %s\n",
               members_[peer.rank].Name().c_str(), what.c_str());
}

void Hub::Handle(Peer& peer, const Frame& frame) {
  if (peer.rank >= 0) return HandleRank(peer, frame);
  if (!Is<messages::Hello>(frame)) throw ProtocolError("no hello");
  HandleHello(peer, frame);
}

void Hub::HandleRank(Peer& peer, const Frame& frame) {
  const Scope scope{static_cast<int>(members_.size()), peer.rank};
  const bool has_left = members_[peer.rank].state == Member::State::kLeft;
  if (has_left && !Is<messages::Status>(frame)) return;
  switch (static_cast<Kind>(frame.kind)) {
    case Kind::kSet:
      return HandleSet(peer, Decode<messages::Set>(frame, scope));
    case Kind::kGet:
      return HandleGet(peer, Decode<messages::Get>(frame, scope).key);
    case Kind::kWaiting:
      return HandleWaiting(peer.rank, Decode<messages::Waiting>(frame, scope));
    case Kind::kOverdue:
      return HandleOverdue(peer.rank, Decode<messages::Overdue>(frame, scope));
    case Kind::kStatus:
      return HandleStatus(peer.rank, Decode<messages::Status>(frame, scope));
    case Kind::kAbort:
      return Fail(Decode<messages::Abort>(frame, scope).message);
    case Kind::kInterrupt:
      return HandleInterrupt(Decode<messages::Interrupt>(frame, scope));
    case Kind::kReady:
      return HandleReady(peer.rank, Decode<messages::Ready>(frame, scope).epoch);
    case Kind::kLeave:
      return HandleLeave(peer.rank, Decode<messages::Leave>(frame, scope));
    default:
      throw ProtocolError("no message from a rank to the hub is of kind " +
                          std::to_string(frame.kind));
  }
}

void Hub::HandleHello(Peer& peer, const Frame& frame) {
  uint64_t protocol = 0;
  Reader(frame, {}).Number(protocol);
  if (protocol != kProtocol) return Refuse(peer, "another version of onnxpar", false);
  const auto hello = Decode<messages::Hello>(frame, {});
  bool again = true;
  const std::string reason = WhyRefused(hello, &again);
  if (!reason.empty()) return Refuse(peer, reason, again);
  if (members_.empty()) Begin(hello);
  join_until_ = std::min(join_until_, Clock::now() + hello.patience);
  Member& member = members_[hello.rank];
  member.state = Member::State::kJoined;
  member.process = hello.process;
  member.host = hello.host;
  on_several_hosts_ = on_several_hosts_ || hello.host != HostName();
  for (Member& each : members_) each.names_host = on_several_hosts_;
  peer.rank = member.rank;
  peer.connection.Send(messages::Accept{});
  WelcomeIfComplete();
}

/// Returns the reason to refuse a rank's Hello, or "" if it may join. Sets `again` if the rank may
/// try again later.
std::string Hub::WhyRefused(const messages::Hello& hello, bool* again) const {
  *again = true;
  if (!failure_.empty()) return failure_;
  const uint64_t size = members_.empty() ? hello.size : members_.size();
  if (hello.size != size || hello.rank >= size || size > kMaxWorld) {
    *again = false;
    return "rank " + std::to_string(hello.rank) + " (" + hello.process + ") expects a world of " +
           std::to_string(hello.size) + " ranks, but other ranks expect " + std::to_string(size);
  }
  if (members_.empty() || members_[hello.rank].state == Member::State::kAbsent) return "";
  return "the world already has " + members_[hello.rank].Name();
}

void Hub::Begin(const messages::Hello& hello) {
  members_.resize(hello.size);
  for (size_t i = 0; i < hello.size; ++i) members_[i].rank = static_cast<int>(i);
  join_until_ = Clock::now() + hello.patience;
  timeout_seconds_ = static_cast<double>(hello.timeout.count()) / 1000;
}

void Hub::WelcomeIfComplete() {
  for (const Member& each : members_) {
    if (each.state != Member::State::kJoined) return;
  }
  welcomed_ = true;
  Tell(messages::Welcome{Server()});
}

/// Returns the process that serves this hub, as errors name it, e.g. "rank 0 (pid 4711)".
std::string Hub::Server() const {
  if (host_rank_ >= 0) return members_[host_rank_].Name();
  return on_several_hosts_ ? "the launcher on " + HostName() : "the launcher";
}

void Hub::HandleSet(Peer& peer, messages::Set set) {
  const auto found = values_.find(set.key);
  if (found != values_.end()) {
    if (found->second.value == set.value) return;
    throw ProtocolError("another value of '" + set.key + "', which rank " +
                        std::to_string(found->second.owner) + " has set");
  }
  const size_t bytes = kStoredBytes + set.key.size() + set.value.size();
  if (bytes > MaxStored(members_.size()) - peer.stored) {
    throw ProtocolError("more values than a world of " + std::to_string(members_.size()) +
                        " ranks needs");
  }
  peer.stored += bytes;
  values_[set.key] = {set.value, peer.rank};
  const messages::Value value{set.key, set.value};
  for (const auto& each : peers_) {
    if (each->wanted.erase(set.key) > 0) each->connection.Send(value);
  }
}

void Hub::HandleGet(Peer& peer, const std::string& key) {
  const auto found = values_.find(key);
  if (found != values_.end()) {
    return peer.connection.Send(messages::Value{key, found->second.value});
  }
  if (peer.wanted.size() >= kMaxWanted) throw ProtocolError("too many keys asked for");
  peer.wanted.insert(key);
}

/// True if a report is about the current epoch, which has not been interrupted; else it is
/// outdated.
bool Hub::IsCurrent(const Report& report) const { return report.epoch == epoch_ && !interruption_; }

void Hub::HandleWaiting(int rank, Report report) {
  if (!IsCurrent(report)) return;
  const uint64_t stream = report.stream;
  members_[rank].waiting[stream] = std::move(report);
  auto reason = FindDisagreement(members_, rank);
  if (!reason) reason = FindDeserter(members_, rank);
  if (reason) Fail(*reason);
}

void Hub::HandleOverdue(int rank, Report report) {
  if (!IsCurrent(report)) return;
  members_[rank].waiting[report.stream] = report;
  if (!failure_.empty() || inquiry_) return;
  if (const auto reason = FindDeserter(members_, rank)) return Fail(*reason);
  inquiry_ = std::make_unique<Inquiry>();
  inquiry_->question = ++questions_;
  inquiry_->report = std::move(report);
  inquiry_->reporter = rank;
  inquiry_->until = Clock::now() + kAnswerTime;
  const Report& asked = inquiry_->report;
  const messages::Ask question{inquiry_->question, asked.ranks, asked.stream, asked.run};
  for (int member : asked.ranks) {
    Peer* const peer = member == rank ? nullptr : PeerOf(member);
    if (peer == nullptr) continue;
    peer->connection.Send(question);
    inquiry_->asked.insert(member);
  }
  if (inquiry_->asked.empty()) ConcludeInquiry();
}

void Hub::HandleStatus(int rank, const messages::Status& status) {
  if (!inquiry_ || status.question != inquiry_->question) return;
  if (inquiry_->asked.count(rank) == 0) throw ProtocolError("an answer to no question");
  inquiry_->answers[rank] = {status.begun, status.doing, status.awaited};
  if (inquiry_->answers.size() == inquiry_->asked.size()) ConcludeInquiry();
}

void Hub::ConcludeInquiry() {
  const std::unique_ptr<Inquiry> inquiry = std::move(inquiry_);
  Fail(DescribeOverdue(members_, inquiry->report, inquiry->reporter, inquiry->answers,
                       timeout_seconds_, Server()));
}

void Hub::HandleInterrupt(const messages::Interrupt& interrupt) {
  if (interrupt.epoch != epoch_ || interruption_ || !failure_.empty()) return;
  interruption_ = interrupt.message;
  inquiry_.reset();
  Tell(messages::Stop{epoch_, interrupt.call, interrupt.message});
  RenewOnceReady();
}

/// Notes that a rank has left the interrupted run. Its Ready may arrive before the Interrupt of
/// another rank that caused it.
void Hub::HandleReady(int rank, uint64_t epoch) {
  if (epoch != epoch_ || !failure_.empty()) return;
  members_[rank].is_ready = true;
  RenewOnceReady();
}

void Hub::RenewOnceReady() {
  const auto is_ready = [](const Member& member) { return member.is_ready; };
  if (std::none_of(members_.begin(), members_.end(), is_ready)) return;
  if (interruption_ && !ready_until_) {
    ready_until_ = Clock::now() + milliseconds(static_cast<int64_t>(timeout_seconds_ * 1000));
  }
  for (const Member& member : members_) {
    if (interruption_ && member.state == Member::State::kLeft) {
      return Fail(member.Left());
    }
    if (!member.is_ready) return;
  }
  for (Member& member : members_) {
    member.is_ready = false;
    member.waiting.clear();
  }
  values_.clear();
  for (const auto& peer : peers_) {
    peer->stored = 0;
    peer->wanted.clear();
  }
  inquiry_.reset();
  ready_until_.reset();
  Tell(messages::Renewed{++epoch_, interruption_.value_or("")});
  interruption_.reset();
}

void Hub::HandleLeave(int rank, messages::Leave leave) {
  Member& leaver = members_[rank];
  leaver.state = Member::State::kLeft;
  leaver.waiting.clear();
  leaver.ran = std::move(leave.runs);
  leaver.why = std::move(leave.why);
  if (ready_until_) return Fail(leaver.Left());
  for (const Member& member : members_) {
    if (const auto reason = FindDeserter(members_, member.rank)) return Fail(*reason);
  }
}

void Hub::Lose(Peer& peer, const std::string& how) {
  peer.connection.Close();
  if (peer.rank < 0 || members_[peer.rank].state != Member::State::kJoined) return;
  Fail(members_[peer.rank].Name() + how);
}

void Hub::CheckDeadlines() {
  const auto now = Clock::now();
  if (inquiry_ && now >= inquiry_->until) ConcludeInquiry();
  if (!members_.empty() && !welcomed_ && failure_.empty() && now >= join_until_) {
    const std::string why = acceptor_.is_starved()
                                ? "; the hub could not accept all ranks: " + OutOfDescriptors()
                                : std::string();
    const std::string where =
        IsLoopback(address_) ? std::string() : "; " + Server() + " waits at " + address_.Text();
    Fail(DescribeAbsent(members_, timeout_seconds_) + where + why);
  }
  if (ready_until_ && now >= *ready_until_) Fail(DescribeUnready(members_, timeout_seconds_));
  for (const auto& peer : peers_) {
    if (peer->rank < 0 && now >= peer->until) peer->connection.Close();
  }
}

Hub::Peer* Hub::PeerOf(int rank) {
  for (const auto& peer : peers_) {
    if (peer->rank == rank && peer->connection.open()) return peer.get();
  }
  return nullptr;
}

void Hub::Fail(const std::string& message) {
  if (!failure_.empty()) return;
  failure_ = message;
  ready_until_.reset();
  Tell(messages::Fail{message});
}

void Hub::Refuse(Peer& peer, const std::string& message, bool again) {
  peer.is_refused = true;
  peer.connection.Send(messages::Refuse{message, again});
}

}  // namespace onnxpar
