#include "tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace onnxpar {
namespace {

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// The most bytes of one TLS record, which are encrypted together.
constexpr size_t kTlsRecord = 16384;

socklen_t SizeOf(const sockaddr* address) {
  return address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

std::string TextOf(const sockaddr* address) {
  char text[NI_MAXHOST] = "";
  getnameinfo(address, SizeOf(address), text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return text;
}

/// Calls visit(entry) for each IPv4 or IPv6 address of each network interface that is up.
void EachInterface(const std::function<void(const ifaddrs&)>& visit) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(first, freeifaddrs);
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    const int family = each->ifa_addr->sa_family;
    if (family == AF_INET || family == AF_INET6) visit(*each);
  }
}

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* const ip = reinterpret_cast<const sockaddr_in*>(address);
    return ntohl(ip->sin_addr.s_addr) >> 24 == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

/// True for an IPv6 address that means something only together with the name of an interface.
bool IsLinkLocal(const sockaddr* address) {
  if (address->sa_family == AF_INET) return false;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

/// Returns the first IPv4 address of the interface `name`, else its first IPv6 address; `name`
/// itself if there is no such interface.
std::string AddressOfInterface(const std::string& name) {
  std::string found;
  bool is_ipv4 = false;
  EachInterface([&](const ifaddrs& each) {
    const bool ipv4 = each.ifa_addr->sa_family == AF_INET;
    if (name != each.ifa_name || (!found.empty() && (is_ipv4 || !ipv4))) return;
    found = TextOf(each.ifa_addr);
    is_ipv4 = ipv4;
  });
  return found.empty() ? name : found;
}

AddressInfo Resolve(const Address& address, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* result = nullptr;
  const std::string port = std::to_string(address.port);
  const int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &result);
  if (error != 0) {
    throw UnknownHost("cannot resolve host '" + address.host + "': " + gai_strerror(error));
  }
  return {result, freeaddrinfo};
}

/// Resolves an address to listen on; its host may be the name of an interface. Throws UnknownHost,
/// with a list of the interfaces, if it is neither that nor an address of this host.
AddressInfo ResolveOwn(const Address& address, int flags) {
  try {
    return Resolve({AddressOfInterface(address.host), address.port}, flags);
  } catch (const UnknownHost&) {
    std::set<std::string> names;
    EachInterface([&](const ifaddrs& each) { names.insert(each.ifa_name); });
    std::string all;
    for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
    throw UnknownHost("there is no interface or address '" + address.host +
                      "' on this host (--interface); its interfaces are " + all);
  }
}

[[noreturn]] void ThrowErrno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

std::string Address::Text() const {
  const bool ipv6 = host.find(':') != std::string::npos;
  return (ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

TcpSocket::TcpSocket(int descriptor) : descriptor_(descriptor) {
  fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

TcpSocket::~TcpSocket() { Close(); }

TcpSocket::TcpSocket(TcpSocket&& other) noexcept { *this = std::move(other); }

TcpSocket& TcpSocket::operator=(TcpSocket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(is_owner_, other.is_owner_);
  std::swap(tls_, other.tls_);
  return *this;
}

TcpSocket TcpSocket::Connect(const Address& address) {
  const AddressInfo info = Resolve(address, 0);
  const int descriptor = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) {
    const bool full = errno == EMFILE || errno == ENFILE;
    ThrowErrno(errno, full ? OutOfDescriptors() : "cannot make a socket");
  }
  TcpSocket made(descriptor);
  if (connect(descriptor, info->ai_addr, info->ai_addrlen) != 0 && errno != EINPROGRESS) {
    const int error = errno;
    made.Close();
    errno = error;
  }
  return made;
}

int TcpSocket::ConnectError() const {
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(descriptor_, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

void TcpSocket::Close() {
  tls_.reset();
  if (open() && is_owner_) close(descriptor_);
  descriptor_ = -1;
}

ssize_t TcpSocket::Read(void* data, size_t bytes) {
  return tls_ ? tls_->Read(data, bytes) : recv(descriptor_, data, bytes, 0);
}

ssize_t TcpSocket::Write(const void* data, size_t bytes) {
  return tls_ ? tls_->Write(data, bytes) : send(descriptor_, data, bytes, MSG_NOSIGNAL);
}

/// TLS writes one buffer at a time. So if the first bytes of all buffers fit in one TLS record,
/// they are copied to one buffer.
ssize_t TcpSocket::Write(const iovec* parts, int count) {
  if (!tls_) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = static_cast<size_t>(count);
    return sendmsg(descriptor_, &message, MSG_NOSIGNAL);
  }
  if (count == 1 || parts[0].iov_len >= kTlsRecord) {
    return tls_->Write(parts[0].iov_base, parts[0].iov_len);
  }
  char record[kTlsRecord];
  size_t size = 0;
  for (int i = 0; i < count; ++i) {
    const size_t bytes = std::min(parts[i].iov_len, kTlsRecord - size);
    std::memcpy(record + size, parts[i].iov_base, bytes);
    size += bytes;
  }
  return tls_->Write(record, size);
}

std::string TcpSocket::LocalHost() const {
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (getsockname(descriptor_, reinterpret_cast<sockaddr*>(&own), &size) != 0) return "";
  return TextOf(reinterpret_cast<const sockaddr*>(&own));
}

int Listen(Address* address) {
  const AddressInfo info = ResolveOwn(*address, AI_PASSIVE);
  address->host = AddressOfInterface(address->host);
  const int listener = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (listener < 0 || bind(listener, info->ai_addr, info->ai_addrlen) != 0 ||
      listen(listener, SOMAXCONN) != 0) {
    const int error = errno;
    if (listener >= 0) close(listener);
    ThrowErrno(error, "cannot listen on " + address->Text());
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &size);
  // The port has the same offset in an IPv4 and in an IPv6 address.
  address->port = ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return listener;
}

bool IsLoopback(const Address& address) {
  const AddressInfo info = ResolveOwn(address, 0);
  for (const addrinfo* each = info.get(); each != nullptr; each = each->ai_next) {
    if (!IsLoopback(each->ai_addr)) return false;
  }
  return true;
}

std::vector<std::string> HostAddresses() {
  std::vector<std::string> ipv4, ipv6;
  EachInterface([&](const ifaddrs& each) {
    if (IsLoopback(each.ifa_addr) || IsLinkLocal(each.ifa_addr)) return;
    (each.ifa_addr->sa_family == AF_INET ? ipv4 : ipv6).push_back(TextOf(each.ifa_addr));
  });
  ipv4.insert(ipv4.end(), ipv6.begin(), ipv6.end());
  return ipv4;
}

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string OutOfDescriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return "this process has used all its " + std::to_string(limit.rlim_cur) + " file descriptors" +
         "; close files, or raise the limit (ulimit -n)";
}

}  // namespace onnxpar
