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

/// The exception for the name of a host that has no address. It may get one later: a cluster may
/// publish the names of hosts a moment after ranks start.
class UnknownHost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One end of a TCP connection, closed on destruction. Read and Write do not block: instead of
/// waiting, they return -1 with errno EAGAIN.
class TcpSocket {
 public:
  TcpSocket() = default;
  explicit TcpSocket(int descriptor);
  ~TcpSocket();
  TcpSocket(TcpSocket&& other) noexcept;
  TcpSocket& operator=(TcpSocket&& other) noexcept;

  /// Begins to connect, without waiting. Once poll reports that the descriptor is writable,
  /// ConnectError tells whether it succeeded. Returns a closed socket, and sets errno, if the
  /// attempt fails at once. Throws std::system_error if this process cannot open a socket.
  static TcpSocket Connect(const Address& address);
  /// Returns 0 if the connection is established, else the errno of the failed attempt.
  int ConnectError() const;

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  void Close();
  /// From now on, another object closes the descriptor; the destructor does not.
  void Disown() { is_owner_ = false; }
  /// From now on, Write encrypts and Read decrypts, by this TLS session.
  void Encrypt(std::unique_ptr<TlsSession> tls) { tls_ = std::move(tls); }
  TlsSession* tls() { return tls_.get(); }

  /// Reads at most `bytes` bytes and returns their number; 0 at the end of the connection, -1 for
  /// an error.
  ssize_t Read(void* data, size_t bytes);
  ssize_t Write(const void* data, size_t bytes);
  /// Writes bytes of `count` buffers in sequence, as many as the connection takes, and returns
  /// their number; -1 for an error.
  ssize_t Write(const iovec* parts, int count);
  /// True if Read would return bytes that TLS has already taken from the descriptor, so poll does
  /// not report them.
  bool HasUnread() const { return tls_ && tls_->HasUnread(); }

  /// Returns the address of this end of the connection, as the other end sees it.
  std::string LocalHost() const;

 private:
  int descriptor_ = -1;
  bool is_owner_ = true;
  std::unique_ptr<TlsSession> tls_;
};

/// Listens on `address`, whose host may also be the name of a network interface. Returns the
/// descriptor. If the port is 0, takes a free port and stores it in `address`. Throws
/// std::system_error.
int Listen(Address* address);

/// True if only processes on this host can reach the address. Throws if its host has no address.
bool IsLoopback(const Address& address);

/// Returns the addresses by which other hosts may reach this one, IPv4 addresses first.
std::vector<std::string> HostAddresses();

/// Returns the name of this host.
std::string HostName();

/// Returns the text of an error for the user: this process has no descriptors left for sockets and
/// files, and how to allow more.
std::string OutOfDescriptors();

}  // namespace onnxpar
