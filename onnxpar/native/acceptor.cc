#include "acceptor.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace onnxpar {
namespace {

using std::chrono::milliseconds;

/// The longest duration of a handshake. Ranks need a few round trips, and less than a millisecond
/// of computing.
constexpr milliseconds kHandshakeTime{5000};
constexpr size_t kMaxStrangers = 128;
/// The pause before the next attempt to accept, after the process has run out of descriptors.
constexpr milliseconds kStarved{100};
/// The most connections that one Advance accepts, so that handshakes under way also continue.
constexpr int kAtOnce = 32;

}  // namespace

Acceptor::Acceptor(Address* address, Credentials credentials, std::string purpose)
    : credentials_(std::move(credentials)), purpose_(std::move(purpose)) {
  CheckExposure(*address, credentials_);
  listener_ = Listen(address);
}

Acceptor::~Acceptor() { close(listener_); }

void Acceptor::Watch(std::vector<pollfd>* descriptors) const {
  const bool accepts = !is_starved_ || Clock::now() >= accept_from_;
  descriptors->push_back({accepts ? listener_ : -1, POLLIN, 0});
  for (const Stranger& each : strangers_) {
    descriptors->push_back({each.handshake.descriptor(), each.handshake.events(), 0});
  }
}

void Acceptor::Advance(const pollfd* ready) {
  const bool arrived = ready[0].revents != 0;
  const auto now = Clock::now();
  for (auto each = strangers_.begin(); each != strangers_.end();) {
    const bool moves = (++ready)->revents != 0;
    const bool stays = (!moves || Goes(each->handshake)) && now < each->until;
    each = stays ? std::next(each) : strangers_.erase(each);
  }
  if (arrived) AcceptAll();
}

/// Continues a handshake as far as possible without waiting. Returns true if it is still under way,
/// false if it has succeeded (its connection is then ready for Next) or failed.
bool Acceptor::Goes(Handshake& handshake) {
  const auto state = handshake.Advance();
  if (state == Handshake::State::kDone) {
    accepted_.push_back({handshake.Take(), handshake.identity()});
  }
  return state == Handshake::State::kUnderWay;
}

/// Accepts up to kAtOnce waiting connections and starts their handshakes. If this process has no
/// descriptor left, the connections stay in the kernel's queue, neither refused nor lost.
void Acceptor::AcceptAll() {
  for (int i = 0; i < kAtOnce; ++i) {
    const int descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    is_starved_ = descriptor < 0 && (errno == EMFILE || errno == ENFILE);
    accept_from_ = Clock::now() + kStarved;
    const bool full = descriptor >= 0 && strangers_.size() >= kMaxStrangers;
    if (full || (is_starved_ && !strangers_.empty())) strangers_.pop_front();
    if (descriptor < 0) return;
    Stranger made{Handshake::Accepts(TcpSocket(descriptor), credentials_, purpose_),
                  Clock::now() + kHandshakeTime};
    if (Goes(made.handshake)) strangers_.push_back(std::move(made));
  }
}

Acceptor::Clock::time_point Acceptor::deadline() const {
  auto first = Clock::time_point::max();
  if (is_starved_) first = accept_from_;
  if (!strangers_.empty()) first = std::min(first, strangers_.front().until);
  return first;
}

std::optional<Accepted> Acceptor::Next() {
  if (accepted_.empty()) return std::nullopt;
  std::optional<Accepted> next = std::move(accepted_.front());
  accepted_.pop_front();
  return next;
}

}  // namespace onnxpar
