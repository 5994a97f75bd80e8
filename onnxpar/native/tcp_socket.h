// TCP connections, plain or encrypted, and the addresses of hosts.
#pragma once

#include <netdb.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tls.h"

namespace onnxpar {

struct Address {
  std::string host;
  int port = 0;

  std::string Text() const;
};

/// The name of a host has no address, or none yet: a cluster may publish names of hosts that start
/// a moment later.
class UnknownHost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One end of a TCP connection, closed on destruction. Its calls do not block: if they would have
/// to wait, they return -1 and set errno to EAGAIN.
class TcpSocket {
 public:
  TcpSocket() = default;
  explicit TcpSocket(int descriptor);
  ~TcpSocket();
  TcpSocket(TcpSocket&& other) noexcept;
  TcpSocket& operator=(TcpSocket&& other) noexcept;

  /// Begins to connect. When the attempt is over, poll reports that the descriptor can be written,
  /// and ConnectError returns its result. Returns a closed socket, and sets errno, if the attempt
  /// has failed already. Throws std::system_error if this process cannot open a socket.
  static TcpSocket Connect(const Address& address);
  /// Returns the errno of Connect, 0 if the connection exists.
  int ConnectError() const;

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  void Close();
  /// Lets another owner close the descriptor.
  void Disown() { is_owner_ = false; }
  /// From now on, encrypts written bytes, and decrypts read bytes.
  void Encrypt(std::unique_ptr<TlsSession> tls) { tls_ = std::move(tls); }
  TlsSession* tls() { return tls_.get(); }

  /// Reads some bytes; returns 0 at the end of the connection.
  ssize_t Read(void* data, size_t bytes);
  ssize_t Write(const void* data, size_t bytes);
  /// Writes some bytes from several buffers.
  ssize_t Write(const iovec* parts, int count);
  /// True if Read has bytes that the descriptor no longer has.
  bool HasUnread() const { return tls_ && tls_->HasUnread(); }

  /// The host of this end, as the other end knows it.
  std::string LocalHost() const;

 private:
  int descriptor_ = -1;
  bool is_owner_ = true;
  std::unique_ptr<TlsSession> tls_;
};

/// Listens on `address` and returns the descriptor. If the port is 0, takes a free one and sets it
/// in `address`. The host may be the name of an interface. Throws std::system_error.
int Listen(Address* address);

/// True if no other host can reach the address. Throws if it cannot be resolved.
bool IsLoopback(const Address& address);

/// Returns the addresses of this host that others may reach, those of IPv4 first.
std::vector<std::string> HostAddresses();

/// Returns the name of this host.
std::string HostName();

/// Returns a text for the user: why this process can open no more sockets and files, and the
/// remedy.
std::string OutOfDescriptors();

}  // namespace onnxpar
