#include "wire.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace onnxpar {
namespace {

constexpr size_t kLengthBytes = sizeof(uint32_t);
/// Far above any frame of ours; a longer one is not ours.
constexpr uint32_t kMaxFrame = 16 << 20;

template <typename Number>
void Append(std::string* bytes, Number number) {
  bytes->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

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

Frame::Frame(Kind kind) : bytes_(1, static_cast<char>(kind)) {}

Frame& Frame::Add(uint64_t value) {
  Append(&bytes_, value);
  return *this;
}

Frame& Frame::Add(const std::string& text) {
  Add(text.size());
  bytes_ += text;
  return *this;
}

Frame& Frame::Add(const std::vector<int>& values) {
  return Add(std::vector<int64_t>(values.begin(), values.end()));
}

Frame& Frame::Add(const std::vector<int64_t>& values) {
  Add(values.size());
  for (int64_t value : values) Add(static_cast<uint64_t>(value));
  return *this;
}

Frame& Frame::Add(const Report& report) {
  return Add(report.epoch)
      .Add(report.ranks)
      .Add(report.run)
      .Add(report.signature)
      .Add(report.sends)
      .Add(report.receives)
      .Add(report.name)
      .Add(report.description);
}

std::string Frame::Bytes() const {
  std::string frame;
  Append(&frame, static_cast<uint32_t>(bytes_.size()));
  return frame + bytes_;
}

uint64_t Fields::Number() {
  uint64_t value;
  if (bytes_.size() - position_ < sizeof(value)) throw std::runtime_error("short frame");
  std::memcpy(&value, bytes_.data() + position_, sizeof(value));
  position_ += sizeof(value);
  return value;
}

std::string Fields::Text() {
  const uint64_t size = Number();
  if (bytes_.size() - position_ < size) throw std::runtime_error("short frame");
  const std::string text = bytes_.substr(position_, size);
  position_ += size;
  return text;
}

std::vector<int64_t> Fields::Longs() {
  std::vector<int64_t> values;
  for (uint64_t left = Number(); left > 0; --left) values.push_back(static_cast<int64_t>(Number()));
  return values;
}

std::vector<int> Fields::Ints() {
  const std::vector<int64_t> values = Longs();
  return {values.begin(), values.end()};
}

Report Fields::ReadReport() {
  Report report;
  report.epoch = Number();
  report.ranks = Ints();
  report.run = Number();
  report.signature = Number();
  report.sends = Longs();
  report.receives = Longs();
  report.name = Text();
  report.description = Text();
  return report;
}

Connection::Connection(int descriptor) : descriptor_(descriptor) {
  fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Connection::~Connection() { Close(); }

Connection::Connection(Connection&& other) noexcept { *this = std::move(other); }

Connection& Connection::operator=(Connection&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(incoming_, other.incoming_);
  std::swap(outgoing_, other.outgoing_);
  return *this;
}

void Connection::Close() {
  if (open()) close(descriptor_);
  descriptor_ = -1;
}

bool Connection::Fill() {
  char buffer[4096];
  for (;;) {
    const ssize_t count = recv(descriptor_, buffer, sizeof(buffer), 0);
    if (count > 0) {
      incoming_.append(buffer, static_cast<size_t>(count));
    } else if (count == 0) {
      return false;
    } else if (errno != EINTR) {
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
  }
}

std::optional<Fields> Connection::Next() {
  uint32_t size = 0;
  if (incoming_.size() < kLengthBytes) return std::nullopt;
  std::memcpy(&size, incoming_.data(), kLengthBytes);
  if (size == 0 || size > kMaxFrame) throw std::runtime_error("not a frame of onnxpar");
  if (incoming_.size() < kLengthBytes + size) return std::nullopt;
  Fields fields(incoming_.substr(kLengthBytes, size));
  incoming_.erase(0, kLengthBytes + size);
  return fields;
}

void Connection::Send(const Frame& frame) {
  outgoing_ += frame.Bytes();
  Flush();
}

bool Connection::Flush() {
  while (!outgoing_.empty()) {
    const ssize_t count = send(descriptor_, outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      outgoing_.erase(0, static_cast<size_t>(count));
    } else if (errno != EINTR) {
      return errno == EAGAIN || errno == EWOULDBLOCK;
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
    throw std::system_error(
        error, std::generic_category(),
        "cannot listen on " + address->host + ":" + std::to_string(address->port));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &size);
  // The port is at the same place in an IPv4 and in an IPv6 address.
  address->port = ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return listener;
}

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

Connection Connect(const Address& address, std::chrono::milliseconds timeout) {
  const AddressInfo info = Resolve(address, 0);
  Connection connection(socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(connection.descriptor(), info->ai_addr, info->ai_addrlen) == 0) return connection;
  if (errno != EINPROGRESS) return {};
  pollfd waiting{connection.descriptor(), POLLOUT, 0};
  if (poll(&waiting, 1, static_cast<int>(timeout.count())) != 1) return {};
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(connection.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return {};
  return connection;
}

}  // namespace onnxpar
