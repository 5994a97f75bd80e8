#include "secure_pair.h"

#include <gloo/transport/tcp/unbound_buffer.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

namespace onnxpar {

using gloo::transport::tcp::Op;
using gloo::transport::tcp::UnboundBuffer;
using Buffer = gloo::NonOwningPtr<UnboundBuffer>;

namespace {

/// A timeout that Gloo requires for its sockets. It has no effect, because they do not block; each
/// wait for a message has its own timeout.
constexpr std::chrono::milliseconds kUnused{60'000};

}  // namespace

SecurePair::SecurePair(gloo::transport::tcp::Context* context, gloo::transport::tcp::Device* device,
                       int rank, TcpSocket socket)
    : Pair(context, device, rank, context->getTimeout()), socket_(std::move(socket)) {}

SecurePair::~SecurePair() {
  std::lock_guard<std::mutex> lock(m_);
  if (state_ != CLOSED) SecurePair::changeState(CLOSED);
}

/// From here on, Gloo owns the descriptor, and closes it.
void SecurePair::Open() {
  socket_.Disown();
  auto connected = std::make_shared<gloo::transport::tcp::Socket>(socket_.descriptor());
  state_ = CONNECTING;
  connectCallback(std::move(connected), gloo::transport::tcp::Error::kSuccess);
}

void SecurePair::changeState(state next) noexcept {
  if (next == CLOSED) socket_.Close();
  Pair::changeState(next);
}

/// Reads as much of the next message as has arrived; returns true when the message is complete.
bool SecurePair::read() {
  if (state_ == CLOSED) return false;
  Buffer buffer;
  for (;;) {
    if (rx_.nread == sizeof(rx_.preamble) && !rx_.ubuf && !Check()) return false;
    iovec part{};
    const ssize_t wanted = prepareRead(rx_, buffer, part);
    if (wanted == 0) break;
    if (wanted < 0) {
      signalException("a receive was given up");
      return false;
    }
    const ssize_t count = Next(part.iov_base, part.iov_len);
    if (count <= 0) return false;
    rx_.nread += static_cast<size_t>(count);
  }
  readComplete(buffer);
  return true;
}

/// Returns the number of bytes read, at most `bytes`; 0 or less if there are none now, or if the
/// connection has ended.
ssize_t SecurePair::Next(void* data, size_t bytes) {
  for (;;) {
    const ssize_t count = socket_.Read(data, bytes);
    if (count > 0) return count;
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return -1;
    signalException(count == 0 ? "its connection was closed" : std::strerror(errno));
    return 0;
  }
}

/// Checks, once the start of a message has arrived, that a receive of its slot and size is posted.
/// Returns false if not.
bool SecurePair::Check() {
  const auto& start = rx_.preamble;
  const bool notifies =
      start.opcode == Op::NOTIFY_SEND_READY || start.opcode == Op::NOTIFY_RECV_READY;
  if (notifies && start.nbytes == sizeof(start)) return true;
  const auto found = localPendingRecv_.find(start.slot);
  const bool expected = start.opcode == Op::SEND_UNBOUND_BUFFER &&
                        found != localPendingRecv_.end() && !found->second.empty() &&
                        start.length == std::get<2>(found->second.front()) &&
                        start.nbytes == sizeof(start) + start.length;
  if (!expected) signalException("it has sent a message that this rank does not expect");
  return expected;
}

/// Writes as much of a message as the connection takes; returns true when the message is complete.
/// A connection that has ended is reported by read.
bool SecurePair::write(Op& op) {
  if (state_ == CLOSED) return false;
  Buffer buffer;
  if (op.getOpcode() == Op::SEND_UNBOUND_BUFFER) {
    buffer = Buffer(op.ubuf);
    if (!buffer) return false;
  }
  while (op.nwritten < op.preamble.nbytes) {
    iovec parts[2];
    int used = 0;
    prepareWrite(op, buffer, parts, used);
    const ssize_t count = socket_.Write(parts, used);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    op.nwritten += static_cast<size_t>(count);
  }
  writeComplete(op, buffer, op.getOpcode());
  return true;
}

SecureContext::SecureContext(std::shared_ptr<gloo::transport::tcp::Device> device, int rank,
                             std::vector<TcpSocket> sockets)
    : Context(std::move(device), rank, static_cast<int>(sockets.size())) {
  setTimeout(kUnused);
  for (size_t other = 0; other < sockets.size(); ++other) {
    if (static_cast<int>(other) == rank) continue;
    auto pair = std::make_unique<SecurePair>(this, device_.get(), static_cast<int>(other),
                                             std::move(sockets[other]));
    pair->Open();
    pairs_[other] = std::move(pair);
  }
}

}  // namespace onnxpar
