#include "local_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>

namespace onnxpar {
namespace {

using std::chrono::milliseconds;

constexpr timeval kConnectTime{5, 0};

int NewSocket() {
  const int descriptor = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (descriptor >= 0) return descriptor;
  throw std::system_error(errno, std::generic_category(), "cannot open a Unix socket");
}

/// Returns the address of the socket with this name in the abstract namespace, which has no files.
sockaddr_un AddressOf(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t bytes = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), bytes);
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  return address;
}

/// The control part of a message that passes one file descriptor.
union Passed {
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr align;
};

msghdr Envelope(iovec* part, Passed* passed) {
  msghdr message{};
  message.msg_iov = part;
  message.msg_iovlen = 1;
  message.msg_control = passed->bytes;
  message.msg_controllen = sizeof(passed->bytes);
  return message;
}

}  // namespace

LocalSocket::~LocalSocket() {
  if (open()) close(descriptor_);
}

LocalSocket::LocalSocket(LocalSocket&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

LocalSocket& LocalSocket::operator=(LocalSocket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

LocalSocket LocalSocket::Listen(const std::string& name) {
  LocalSocket listener(NewSocket());
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(name, &length);
  if (bind(listener.descriptor_, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener.descriptor_, SOMAXCONN) != 0 ||
      fcntl(listener.descriptor_, F_SETFL, O_NONBLOCK) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot listen on a Unix socket");
  }
  return listener;
}

LocalSocket LocalSocket::Connect(const std::string& name) {
  LocalSocket made(NewSocket());
  setsockopt(made.descriptor_, SOL_SOCKET, SO_SNDTIMEO, &kConnectTime, sizeof(kConnectTime));
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(name, &length);
  const auto* const generic = reinterpret_cast<const sockaddr*>(&address);
  return connect(made.descriptor_, generic, length) == 0 ? std::move(made) : LocalSocket();
}

LocalSocket LocalSocket::Accept() const {
  return LocalSocket(accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC));
}

bool LocalSocket::HasEnded() const {
  pollfd waiting{descriptor_, POLLRDHUP, 0};
  return poll(&waiting, 1, 0) > 0;
}

void LocalSocket::Send(const void* data, size_t bytes, int descriptor) const {
  iovec part{const_cast<void*>(data), bytes};
  Passed passed{};
  const msghdr message = Envelope(&part, &passed);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  sendmsg(descriptor_, &message, MSG_NOSIGNAL);
}

int LocalSocket::Receive(void* data, size_t bytes, Clock::time_point until) const {
  if (!open() || !WaitToRead(until)) return -1;
  iovec part{data, bytes};
  Passed passed{};
  msghdr message = Envelope(&part, &passed);
  const ssize_t count = recvmsg(descriptor_, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* const header = count < 0 ? nullptr : CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return -1;
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
  if (count == static_cast<ssize_t>(bytes)) return descriptor;
  close(descriptor);
  return -1;
}

bool LocalSocket::WaitToRead(Clock::time_point until) const {
  const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
  pollfd waiting{descriptor_, POLLIN, 0};
  return poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000))) > 0;
}

}  // namespace onnxpar
