#include "wire.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace onnxpar {
namespace {

constexpr size_t kLengthBytes = sizeof(uint32_t);
/// The largest number of bytes to read at once, so that no connection delays the others.
constexpr size_t kChunk = 64 << 10;

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressInfo Resolve(const Address& address, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* result = nullptr;
  const std::string port = std::to_string(address.port);
  const int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &result);
  if (error != 0) {
    throw std::runtime_error("cannot resolve host '" + address.host + "': " + gai_strerror(error));
  }
  return {result, freeaddrinfo};
}

}  // namespace

Connection::Connection(int descriptor, size_t longest)
    : descriptor_(descriptor), longest_(longest) {
  fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Connection::~Connection() { Close(); }

Connection::Connection(Connection&& other) noexcept { *this = std::move(other); }

Connection& Connection::operator=(Connection&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(longest_, other.longest_);
  std::swap(skip_, other.skip_);
  std::swap(overflowed_, other.overflowed_);
  std::swap(incoming_, other.incoming_);
  std::swap(outgoing_, other.outgoing_);
  return *this;
}

void Connection::Close() {
  if (open()) close(descriptor_);
  descriptor_ = -1;
}

/// The bytes in `incoming_` are less than a frame: the caller has called Next until it returned
/// none.
bool Connection::Fill() {
  char buffer[4096];
  for (size_t read = 0; read < kChunk && incoming_.size() < kLengthBytes + longest_;) {
    const ssize_t count = recv(descriptor_, buffer, sizeof(buffer), 0);
    if (count > 0) {
      incoming_.append(buffer, static_cast<size_t>(count));
      read += static_cast<size_t>(count);
    } else if (count == 0) {
      return false;
    } else if (errno != EINTR) {
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
  }
  return true;
}

std::optional<Frame> Connection::Next() {
  const size_t skipped = std::min(skip_, incoming_.size());
  incoming_.erase(0, skipped);
  skip_ -= skipped;
  uint32_t size = 0;
  if (skip_ > 0 || incoming_.size() < kLengthBytes) return std::nullopt;
  std::memcpy(&size, incoming_.data(), kLengthBytes);
  if (size == 0 || size > longest_) {
    skip_ = kLengthBytes + size;
    throw ProtocolError("a frame of " + std::to_string(size) + " bytes");
  }
  if (incoming_.size() < kLengthBytes + size) return std::nullopt;
  Frame frame{static_cast<uint8_t>(incoming_[kLengthBytes]),
              incoming_.substr(kLengthBytes + 1, size - 1)};
  incoming_.erase(0, kLengthBytes + size);
  return frame;
}

void Connection::Queue(const std::string& frame) {
  if (frame.size() > 2 * kMaxFrame - std::min(2 * kMaxFrame, outgoing_.size())) {
    overflowed_ = true;
    return;
  }
  outgoing_ += frame;
  Flush();
}

void Connection::Flush() {
  while (!outgoing_.empty()) {
    const ssize_t count = send(descriptor_, outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      outgoing_.erase(0, static_cast<size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      outgoing_.clear();
    }
  }
}

bool IsLoopback(const Address& address) {
  const AddressInfo info = Resolve(address, 0);
  for (const addrinfo* each = info.get(); each != nullptr; each = each->ai_next) {
    if (each->ai_family == AF_INET) {
      const auto* const ip = reinterpret_cast<const sockaddr_in*>(each->ai_addr);
      if (ntohl(ip->sin_addr.s_addr) >> 24 != 127) return false;
    } else {
      const auto* const ip = reinterpret_cast<const sockaddr_in6*>(each->ai_addr);
      if (!IN6_IS_ADDR_LOOPBACK(&ip->sin6_addr)) return false;
    }
  }
  return true;
}

int Listen(Address* address) {
  const AddressInfo info = Resolve(*address, AI_PASSIVE);
  const int listener = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (listener < 0 || bind(listener, info->ai_addr, info->ai_addrlen) != 0 ||
      listen(listener, SOMAXCONN) != 0) {
    const int error = errno;
    if (listener >= 0) close(listener);
    throw std::system_error(error, std::generic_category(), "cannot listen on " + address->Text());
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &size);
  // The port has the same offset in an IPv4 and in an IPv6 address.
  address->port = ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return listener;
}

int NewEvent() {
  const int event = eventfd(0, EFD_CLOEXEC);
  if (event < 0) throw std::system_error(errno, std::generic_category(), "cannot make an eventfd");
  return event;
}

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

Connection Connect(const Address& address, std::chrono::milliseconds timeout) {
  const AddressInfo info = Resolve(address, 0);
  const int descriptor = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) {
    const int error = errno;
    const bool full = error == EMFILE || error == ENFILE;
    throw std::system_error(error, std::generic_category(),
                            full ? OutOfDescriptors() : "cannot make a socket");
  }
  Connection connection(descriptor);
  if (connect(connection.descriptor(), info->ai_addr, info->ai_addrlen) == 0) return connection;
  if (errno != EINPROGRESS) return {};
  pollfd waiting{connection.descriptor(), POLLOUT, 0};
  if (poll(&waiting, 1, PollTime(timeout)) != 1) return {};
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(connection.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return {};
  return connection;
}

int PollTime(std::chrono::milliseconds timeout) {
  if (timeout.count() < 0) return -1;
  return static_cast<int>(
      std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(1)).count());
}

std::string OutOfDescriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return "this process has used all its " + std::to_string(limit.rlim_cur) + " file descriptors" +
         "; close files, or raise the limit (ulimit -n)";
}

}  // namespace onnxpar
