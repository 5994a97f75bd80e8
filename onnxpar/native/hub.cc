#include "hub.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <thread>

namespace onnxpar {
namespace {

using std::chrono::milliseconds;

/// How long a rank has to say whether it has begun a collective. A busy machine needs some of it.
constexpr milliseconds kAnswerTime{1000};
/// How long a goodbye may take to be written.
constexpr milliseconds kGoodbyeTime{200};

}  // namespace

std::shared_ptr<Hub> Hub::Start(Address address, std::string key, int host_rank) {
  std::shared_ptr<Hub> hub(new Hub(std::move(address), std::move(key), host_rank));
  std::thread([hub] { hub->Serve(); }).detach();
  return hub;
}

Hub::Hub(Address address, std::string key, int host_rank)
    : address_(std::move(address)), key_(std::move(key)), host_rank_(host_rank) {
  listener_ = Listen(&address_);
  wake_ = eventfd(0, EFD_CLOEXEC);
}

Hub::~Hub() {
  close(listener_);
  close(wake_);
}

void Hub::Stop() {
  stop_ = true;
  eventfd_write(wake_, 1);
  end_.wait();
}

void Hub::Serve() {
  while (!Ended()) {
    Poll(UntilDeadline());
    CheckDeadlines();
  }
  Poll(milliseconds(0));  // what the ranks said before they heard of the end
  for (const auto& peer : peers_) peer->connection.Send(Frame(Kind::kGoodbye));
  const auto until = Clock::now() + kGoodbyeTime;
  while (Clock::now() < until && std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
           return peer->connection.wants_to_write();
         })) {
    Poll(milliseconds(10));
  }
  peers_.clear();
  ended_.set_value();
}

bool Hub::Ended() const {
  const bool abandoned = welcomed_ && std::none_of(peers_.begin(), peers_.end(),
                                                   [](const auto& p) { return p->rank >= 0; });
  return stop_ || abandoned;
}

milliseconds Hub::UntilDeadline() const {
  const bool joining = !members_.empty() && !welcomed_ && failure_.empty();
  if (!joining && !inquiry_ && !ready_until_) return milliseconds(-1);
  const auto until = inquiry_ ? inquiry_->until : ready_until_ ? *ready_until_ : join_until_;
  const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
  return std::max(left + milliseconds(1), milliseconds(0));
}

void Hub::Poll(milliseconds timeout) {
  std::vector<pollfd> waiting = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};
  for (const auto& peer : peers_) {
    const short events = peer->connection.wants_to_write() ? POLLIN | POLLOUT : POLLIN;
    waiting.push_back({peer->connection.descriptor(), events, 0});
  }
  if (poll(waiting.data(), waiting.size(), static_cast<int>(timeout.count())) <= 0) return;
  const size_t known = peers_.size();
  for (size_t i = 0; i < known; ++i) {
    const short events = waiting[i + 2].revents;
    if (events & POLLOUT) peers_[i]->connection.Flush();
    if (events & (POLLIN | POLLHUP | POLLERR)) Read(*peers_[i]);
  }
  peers_.erase(std::remove_if(peers_.begin(), peers_.end(),
                              [](const auto& peer) { return !peer->connection.open(); }),
               peers_.end());
  if (waiting[1].revents != 0) Accept();
}

void Hub::Accept() {
  const int descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (descriptor < 0) return;
  peers_.push_back(std::make_unique<Peer>());
  peers_.back()->connection = Connection(descriptor);
}

void Hub::Read(Peer& peer) {
  try {
    const bool open = peer.connection.Fill();
    while (auto fields = peer.connection.Next()) Handle(peer, *fields);
    if (!open) Lose(peer);
  } catch (const std::exception&) {  // not a peer that speaks our protocol
    Lose(peer);
  }
}

void Hub::Handle(Peer& peer, Fields& fields) {
  if (fields.kind() == Kind::kHello) return HandleHello(peer, fields);
  if (peer.rank < 0) throw std::runtime_error("no hello");
  switch (fields.kind()) {
    case Kind::kSet:
      return HandleSet(fields);
    case Kind::kGet:
      return HandleGet(peer, fields);
    case Kind::kWaiting:
      return HandleWaiting(peer.rank, fields);
    case Kind::kOverdue:
      return HandleOverdue(peer.rank, fields);
    case Kind::kStatus:
      return HandleStatus(peer.rank, fields);
    case Kind::kAbort:
      return Fail(fields.Text());
    case Kind::kInterrupt:
      return HandleInterrupt(fields);
    case Kind::kReady:
      return HandleReady(peer.rank, fields);
    case Kind::kLeave:
      return HandleLeave(peer.rank, fields);
    default:
      throw std::runtime_error("unknown frame");
  }
}

void Hub::HandleHello(Peer& peer, Fields& fields) {
  const uint64_t protocol = fields.Number();
  const std::string key = fields.Text();
  const uint64_t rank = fields.Number();
  const uint64_t size = fields.Number();
  std::string process = fields.Text();
  const std::string host = fields.Text();
  if (host != HostName()) process += " on " + host;
  const milliseconds timeout(fields.Number());
  const milliseconds patience(fields.Number());
  const std::string who = "rank " + std::to_string(rank) + " (" + process + ")";
  if (protocol != kProtocol) return Refuse(peer, "another version of onnxpar", false);
  if (key != key_) return Refuse(peer, "another world", true);
  if (!failure_.empty()) return Refuse(peer, failure_, true);
  if (members_.empty()) {
    members_.resize(size);
    for (size_t i = 0; i < size; ++i) members_[i].rank = static_cast<int>(i);
    join_until_ = Clock::now() + patience;
    timeout_seconds_ = static_cast<double>(timeout.count()) / 1000;
  }
  if (members_.size() != size || rank >= size) {
    return Refuse(peer,
                  who + " expects a world of " + std::to_string(size) + " ranks, others one of " +
                      std::to_string(members_.size()),
                  false);
  }
  Member& member = members_[rank];
  if (member.state != Member::State::kAbsent) {
    return Refuse(peer, "the world has its " + member.Name() + " already", true);
  }
  join_until_ = std::min(join_until_, Clock::now() + patience);
  member.state = Member::State::kJoined;
  member.process = process;
  peer.rank = static_cast<int>(rank);
  peer.connection.Send(Frame(Kind::kAccept));
  for (const Member& each : members_) {
    if (each.state != Member::State::kJoined) return;
  }
  welcomed_ = true;
  const std::string server = host_rank_ < 0 ? "the launcher" : members_[host_rank_].Name();
  for (const auto& each : peers_) {
    if (each->rank >= 0) each->connection.Send(Frame(Kind::kWelcome).Add(server));
  }
}

void Hub::HandleSet(Fields& fields) {
  const std::string key = fields.Text();
  const std::string value = fields.Text();
  values_[key] = value;
  for (const auto& peer : peers_) {
    auto& wanted = peer->wanted;
    const auto found = std::find(wanted.begin(), wanted.end(), key);
    if (found == wanted.end()) continue;
    wanted.erase(found);
    peer->connection.Send(Frame(Kind::kValue).Add(key).Add(value));
  }
}

void Hub::HandleGet(Peer& peer, Fields& fields) {
  const std::string key = fields.Text();
  const auto found = values_.find(key);
  if (found == values_.end()) {
    peer.wanted.push_back(key);
  } else {
    peer.connection.Send(Frame(Kind::kValue).Add(key).Add(found->second));
  }
}

/// Whether a report is of a run that goes on.
bool Hub::IsCurrent(const Report& report) const {
  return report.epoch == epoch_ && interruption_.empty();
}

void Hub::HandleWaiting(int rank, Fields& fields) {
  Report report = fields.ReadReport();
  if (!IsCurrent(report)) return;
  members_[rank].waiting = std::move(report);
  auto reason = FindDisagreement(members_, rank);
  if (!reason) reason = FindDeserter(members_, rank);
  if (reason) Fail(*reason);
}

void Hub::HandleOverdue(int rank, Fields& fields) {
  Report report = fields.ReadReport();
  if (!IsCurrent(report)) return;
  members_[rank].waiting = std::move(report);
  if (!failure_.empty() || inquiry_) return;
  if (const auto reason = FindDeserter(members_, rank)) return Fail(*reason);
  inquiry_ = std::make_unique<Inquiry>();
  inquiry_->question = ++questions_;
  inquiry_->report = *members_[rank].waiting;
  inquiry_->reporter = rank;
  inquiry_->until = Clock::now() + kAnswerTime;
  const Frame question = Frame(Kind::kAsk)
                             .Add(inquiry_->question)
                             .Add(inquiry_->report.ranks)
                             .Add(inquiry_->report.run);
  for (int member : inquiry_->report.ranks) {
    Peer* const peer = member == rank ? nullptr : PeerOf(member);
    if (peer == nullptr) continue;
    peer->connection.Send(question);
    ++inquiry_->asked;
  }
  if (inquiry_->asked == 0) ConcludeInquiry();
}

void Hub::HandleStatus(int rank, Fields& fields) {
  if (!inquiry_ || fields.Number() != inquiry_->question) return;
  Answer& answer = inquiry_->answers[rank];
  answer.begun = fields.Number() != 0;
  answer.doing = fields.Text();
  if (inquiry_->answers.size() == inquiry_->asked) ConcludeInquiry();
}

void Hub::ConcludeInquiry() {
  const std::unique_ptr<Inquiry> inquiry = std::move(inquiry_);
  Fail(DescribeOverdue(members_, inquiry->report, inquiry->reporter, inquiry->answers,
                       timeout_seconds_));
}

void Hub::HandleInterrupt(Fields& fields) {
  const uint64_t epoch = fields.Number();
  const uint64_t call = fields.Number();
  if (epoch != epoch_ || !interruption_.empty() || !failure_.empty()) return;
  interruption_ = fields.Text();
  inquiry_.reset();
  Tell(Frame(Kind::kStop).Add(epoch_).Add(call).Add(interruption_));
}

void Hub::HandleReady(int rank, Fields& fields) {
  if (fields.Number() != epoch_ || !failure_.empty()) return;
  members_[rank].is_ready = true;
  if (!ready_until_) {
    ready_until_ = Clock::now() + milliseconds(static_cast<int64_t>(timeout_seconds_ * 1000));
  }
  for (const Member& member : members_) {
    if (member.state == Member::State::kLeft) return Fail(member.Name() + " left the world");
    if (!member.is_ready) return;
  }
  for (Member& member : members_) {
    member.is_ready = false;
    member.waiting.reset();
  }
  values_.clear();
  inquiry_.reset();
  ready_until_.reset();
  Tell(Frame(Kind::kRenewed).Add(++epoch_).Add(interruption_));
  interruption_.clear();
}

void Hub::HandleLeave(int rank, Fields& fields) {
  Member& leaver = members_[rank];
  leaver.state = Member::State::kLeft;
  leaver.waiting.reset();
  while (!fields.AtEnd()) {
    const std::vector<int> ranks = fields.Ints();
    leaver.ran[ranks] = fields.Number();
  }
  if (ready_until_) return Fail(leaver.Name() + " left the world");
  for (const Member& member : members_) {
    if (const auto reason = FindDeserter(members_, member.rank)) return Fail(*reason);
  }
}

void Hub::Lose(Peer& peer) {
  peer.connection.Close();
  if (peer.rank < 0 || members_[peer.rank].state != Member::State::kJoined) return;
  Fail(members_[peer.rank].Name() + " died");
}

void Hub::CheckDeadlines() {
  const auto now = Clock::now();
  if (inquiry_ && now >= inquiry_->until) ConcludeInquiry();
  if (!members_.empty() && !welcomed_ && failure_.empty() && now >= join_until_) {
    Fail(DescribeAbsent(members_, timeout_seconds_));
  }
  if (ready_until_ && now >= *ready_until_) Fail(DescribeUnready(members_, timeout_seconds_));
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
  Tell(Frame(Kind::kFail).Add(message));
}

void Hub::Tell(const Frame& frame) {
  for (const auto& peer : peers_) {
    if (peer->rank >= 0 && peer->connection.open()) peer->connection.Send(frame);
  }
}

void Hub::Refuse(Peer& peer, const std::string& message, bool again) {
  peer.connection.Send(Frame(Kind::kRefuse).Add(message).Add(uint64_t{again}));
}

}  // namespace onnxpar
