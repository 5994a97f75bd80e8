#include "control.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace onnxpar {
namespace {

using std::chrono::milliseconds;

/// How often the thread looks whether a collective has become slow.
constexpr milliseconds kTick{20};
/// Between two attempts to join.
constexpr milliseconds kRetry{10};
/// A hub accepts or refuses at once; who does not is something else, or an old hub that is stopped.
constexpr milliseconds kAcceptTime{1000};
/// For the hub's word on why a world is not complete.
constexpr milliseconds kGrace{500};

}  // namespace

Control::Control(int rank, int size, const std::string& store, const std::string& bind_address,
                 milliseconds timeout, ControlListener& listener)
    : timeout_(timeout), listener_(listener) {
  const std::unique_ptr<Rendezvous> rendezvous = Rendezvous::Open(store, bind_address);
  try {
    Join(rank, size, *rendezvous);
  } catch (...) {
    if (hub_) rendezvous->Withdraw();
    StopHub();
    throw;
  }
  if (hub_) rendezvous->Withdraw();
  wake_ = eventfd(0, EFD_CLOEXEC);
  thread_ = std::thread([this] { Serve(); });
}

Control::~Control() {
  stop_ = true;
  eventfd_write(wake_, 1);
  thread_.join();
  close(wake_);
}

void Control::Join(int rank, int size, Rendezvous& rendezvous) {
  const Clock::time_point until = Clock::now() + timeout_;
  std::string error = "rank 0 has not joined the world";
  while (Clock::now() < until) {
    if (rank == 0 && !hub_) hub_ = rendezvous.Serve();
    const std::optional<HubAddress> hub = rendezvous.Find();
    if (hub && TryJoin(*hub, rank, size, until, &error)) return;
    std::this_thread::sleep_for(kRetry);
  }
  throw std::runtime_error("rank " + std::to_string(rank) + " has waited for " +
                           std::to_string(timeout_.count()) + " ms: " + error);
}

/// Returns false with `error` set where a later attempt may succeed.
bool Control::TryJoin(const HubAddress& hub, int rank, int size, Clock::time_point until,
                      std::string* error) {
  const std::string where = hub.address.host + ":" + std::to_string(hub.address.port);
  connection_ = Connect(hub.address, kAcceptTime);
  if (!connection_.open()) {
    *error = "rank 0 has not joined the world: nobody listens on " + where;
    return false;
  }
  const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
  Send(Frame(Kind::kHello)
           .Add(kProtocol)
           .Add(hub.key)
           .Add(static_cast<uint64_t>(rank))
           .Add(static_cast<uint64_t>(size))
           .Add("pid " + std::to_string(getpid()))
           .Add(HostName())
           .Add(static_cast<uint64_t>(timeout_.count()))
           .Add(static_cast<uint64_t>(std::max(left, kRetry).count())));
  std::optional<Fields> answer = Receive(std::min(until, Clock::now() + kAcceptTime));
  if (answer && answer->kind() == Kind::kRefuse) {
    *error = answer->Text();
    if (answer->Number() == 0) throw std::runtime_error(*error);
    return false;
  }
  if (!answer || answer->kind() != Kind::kAccept) {
    if (Clock::now() < until) *error = "no hub of onnxpar answers on " + where;
    return false;
  }
  answer = Receive(until + kGrace);
  if (answer && answer->kind() == Kind::kWelcome) {
    host_ = answer->Text();
    return true;
  }
  if (answer && answer->kind() == Kind::kFail) throw std::runtime_error(answer->Text());
  *error = "the hub on " + where + " has ended, or is stopped";
  return false;
}

/// The next frame; none at the end of the connection or of the time.
std::optional<Fields> Control::Receive(Clock::time_point until) {
  for (;;) {
    if (auto fields = connection_.Next()) return fields;
    const Clock::duration left = until - Clock::now();
    if (left <= Clock::duration::zero()) return {};
    const auto wait = std::chrono::duration_cast<milliseconds>(left) + milliseconds(1);
    pollfd waiting{connection_.descriptor(), POLLIN, 0};
    if (poll(&waiting, 1, static_cast<int>(wait.count())) <= 0) return {};
    if (!connection_.Fill()) return connection_.Next();
  }
}

void Control::Serve() {
  bool open = true;
  while (!stop_ && open) {
    short events = POLLIN;
    int descriptor = -1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      descriptor = connection_.descriptor();
      if (connection_.wants_to_write()) events |= POLLOUT;
    }
    pollfd waiting[] = {{descriptor, events, 0}, {wake_, POLLIN, 0}};
    poll(waiting, 2, static_cast<int>(kTick.count()));
    std::vector<Fields> frames;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open = connection_.Fill() && connection_.Flush();
      while (auto fields = connection_.Next()) frames.push_back(std::move(*fields));
    }
    for (Fields& fields : frames) Handle(fields);
    if (const auto report = listener_.NewlySlow()) Waiting(*report);
  }
  if (!stop_ && !ended_) Fail(host_ + " died");
}

void Control::Handle(Fields& fields) {
  switch (fields.kind()) {
    case Kind::kValue: {
      std::lock_guard<std::mutex> lock(mutex_);
      const std::string key = fields.Text();
      values_[key] = fields.Text();
      changed_.notify_all();
      return;
    }
    case Kind::kAsk: {
      const uint64_t question = fields.Number();
      const std::vector<int> ranks = fields.Ints();
      const Answer answer = listener_.HasBegun(ranks, fields.Number());
      return Send(Frame(Kind::kStatus).Add(question).Add(uint64_t{answer.begun}).Add(answer.doing));
    }
    case Kind::kFail:
      return Fail(fields.Text());
    case Kind::kStop: {
      const uint64_t epoch = fields.Number();
      const uint64_t call = fields.Number();
      return listener_.OnInterrupt(epoch, call, fields.Text());
    }
    case Kind::kRenewed: {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        values_.clear();  // addresses of connections that are made anew
      }
      const uint64_t epoch = fields.Number();
      return listener_.OnRenewed(epoch, fields.Text());
    }
    case Kind::kGoodbye:
      ended_ = true;
      return;
    default:
      return;
  }
}

void Control::Fail(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = reason;
    changed_.notify_all();
  }
  listener_.OnFailure(reason);
}

void Control::Send(const Frame& frame) {
  std::lock_guard<std::mutex> lock(mutex_);
  connection_.Send(frame);
}

void Control::Leave(const std::map<std::vector<int>, uint64_t>& runs) {
  Frame frame(Kind::kLeave);
  for (const auto& [ranks, count] : runs) frame.Add(ranks).Add(count);
  Send(frame);
}

void Control::StopHub() {
  if (hub_) hub_->Stop();
}

void Control::set(const std::string& key, const std::vector<char>& data) {
  Send(Frame(Kind::kSet).Add(key).Add(std::string(data.begin(), data.end())));
}

std::vector<char> Control::get(const std::string& key) {
  wait({key});
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string& value = values_[key];
  return {value.begin(), value.end()};
}

void Control::wait(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (values_.count(key) > 0) continue;
    connection_.Send(Frame(Kind::kGet).Add(key));
    const bool found = changed_.wait_for(
        lock, timeout_, [&] { return values_.count(key) > 0 || !failure_.empty(); });
    if (!failure_.empty()) throw std::runtime_error(failure_);
    if (!found) throw std::runtime_error("no rank has set '" + key + "'");
  }
}

void Control::wait(const std::vector<std::string>& keys, const milliseconds&) { wait(keys); }

}  // namespace onnxpar
