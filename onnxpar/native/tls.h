// TLS 1.3 by the system's OpenSSL, which is loaded only if a user requests TLS.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace onnxpar {

/// One end of an encrypted connection. Its calls do not block: instead of waiting, they return -1
/// with errno EAGAIN, as sockets do.
class TlsSession {
 public:
  TlsSession(void* context, int descriptor, bool accepts);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  /// Continues the TLS handshake. Returns 1 when both ends have accepted each other's certificate,
  /// else -1.
  int ShakeHands();
  ssize_t Read(void* data, size_t bytes);
  ssize_t Write(const void* data, size_t bytes);
  /// True if decrypted bytes are ready, so that Read returns without reading from the socket.
  bool HasUnread() const;
  /// True if the last call, which returned -1, waits until the socket can be written.
  bool wants_to_write() const { return wants_to_write_; }
  /// Returns 32 bytes that both ends of this session, and nobody else, can compute. Throws
  /// std::runtime_error.
  std::string Binding() const;
  /// Returns the reason why the last call failed.
  const std::string& error() const { return error_; }

 private:
  ssize_t Result(int result);

  void* session_;
  bool wants_to_write_ = false;
  std::string error_;
};

/// The TLS settings of this process: its certificate and key, and the authority whose certificates
/// it accepts.
class Tls {
 public:
  /// Reads the files ca.crt, tls.crt and tls.key in the folder that ONNXPAR_TLS_DIR names. Returns
  /// null if the variable is not set. Throws std::runtime_error if a file is missing or invalid, or
  /// if OpenSSL is missing.
  static std::shared_ptr<Tls> FromEnvironment();
  explicit Tls(const std::string& folder);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  std::unique_ptr<TlsSession> NewSession(int descriptor, bool accepts) const;

 private:
  void* context_;
};

}  // namespace onnxpar
