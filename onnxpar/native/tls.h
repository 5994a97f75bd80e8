// TLS 1.3 by the system's OpenSSL, which is loaded if a user requests TLS.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace onnxpar {

/// One end of an encrypted connection. Its calls do not block: if they would have to wait, they
/// return -1 and set errno to EAGAIN, like the calls of sockets.
class TlsSession {
 public:
  TlsSession(void* context, int descriptor, bool accepts);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  /// Exchanges certificates; returns 1 when both are valid, else -1.
  int ShakeHands();
  ssize_t Read(void* data, size_t bytes);
  ssize_t Write(const void* data, size_t bytes);
  /// True if decrypted bytes wait to be read.
  bool HasUnread() const;
  /// True if the last call waits until it can write.
  bool wants_to_write() const { return wants_to_write_; }
  /// Returns 32 bytes that only the two ends of this connection know. Throws std::runtime_error.
  std::string Binding() const;
  /// The reason why the last call failed.
  const std::string& error() const { return error_; }

 private:
  ssize_t Result(int result);

  void* session_;
  bool wants_to_write_ = false;
  std::string error_;
};

/// The certificate of this process, and the authority whose certificates it accepts.
class Tls {
 public:
  /// Reads ca.crt, tls.crt and tls.key of the folder that ONNXPAR_TLS_DIR names; returns null if
  /// the variable is not set. Throws std::runtime_error if files are missing or invalid, or if
  /// OpenSSL is missing.
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
