// Uses only functions that OpenSSL 1.1.1 and 3 have in common, by addresses that dlsym finds, so
// that the plugin needs neither OpenSSL's headers nor a particular version.
#include "tls.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace onnxpar {
namespace {

constexpr int kCtrlMode = 33, kCtrlMinVersion = 123;
constexpr long kTls13 = 0x0304;
constexpr long kPartialWrites = 1, kMovingBuffers = 2;
constexpr int kPem = 1;
constexpr int kVerifyPeer = 1, kFailWithoutCertificate = 2;
constexpr int kWantRead = 2, kWantWrite = 3, kEnd = 6;
constexpr char kLabel[] = "EXPORTER-onnxpar";

/// The functions of OpenSSL, under their own names.
struct OpenSsl {
  void* library = nullptr;
  const void* (*TLS_method)();
  void* (*SSL_CTX_new)(const void*);
  void (*SSL_CTX_free)(void*);
  long (*SSL_CTX_ctrl)(void*, int, long, void*);
  int (*SSL_CTX_load_verify_locations)(void*, const char*, const char*);
  int (*SSL_CTX_use_certificate_chain_file)(void*, const char*);
  int (*SSL_CTX_use_PrivateKey_file)(void*, const char*, int);
  int (*SSL_CTX_check_private_key)(const void*);
  void (*SSL_CTX_set_verify)(void*, int, void*);
  int (*SSL_CTX_set_num_tickets)(void*, size_t);
  void* (*SSL_new)(void*);
  void (*SSL_free)(void*);
  int (*SSL_set_fd)(void*, int);
  void (*SSL_set_connect_state)(void*);
  void (*SSL_set_accept_state)(void*);
  int (*SSL_do_handshake)(void*);
  int (*SSL_read)(void*, void*, int);
  int (*SSL_write)(void*, const void*, int);
  int (*SSL_get_error)(const void*, int);
  int (*SSL_pending)(const void*);
  long (*SSL_get_verify_result)(const void*);
  const char* (*X509_verify_cert_error_string)(long);
  int (*SSL_export_keying_material)(void*, unsigned char*, size_t, const char*, size_t,
                                    const unsigned char*, size_t, int);
  unsigned long (*ERR_peek_last_error)();
  void (*ERR_error_string_n)(unsigned long, char*, size_t);
  void (*ERR_clear_error)();
};

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return;
  throw std::runtime_error(std::string("the OpenSSL of this machine has no ") + name +
                           "; TLS needs OpenSSL 1.1.1 or 3");
}

OpenSsl Load() {
  OpenSsl ssl{};
  for (const char* name : {"libssl.so.3", "libssl.so.1.1"}) {
    if (ssl.library == nullptr) ssl.library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (ssl.library == nullptr) {
    throw std::runtime_error(
        "TLS needs OpenSSL, but there is no libssl.so.3 or libssl.so.1.1 (on Debian and Ubuntu: "
        "apt install libssl3)");
  }
#define FIND(name) Find(ssl.library, #name, &ssl.name)
  FIND(TLS_method);
  FIND(SSL_CTX_new);
  FIND(SSL_CTX_free);
  FIND(SSL_CTX_ctrl);
  FIND(SSL_CTX_load_verify_locations);
  FIND(SSL_CTX_use_certificate_chain_file);
  FIND(SSL_CTX_use_PrivateKey_file);
  FIND(SSL_CTX_check_private_key);
  FIND(SSL_CTX_set_verify);
  FIND(SSL_CTX_set_num_tickets);
  FIND(SSL_new);
  FIND(SSL_free);
  FIND(SSL_set_fd);
  FIND(SSL_set_connect_state);
  FIND(SSL_set_accept_state);
  FIND(SSL_do_handshake);
  FIND(SSL_read);
  FIND(SSL_write);
  FIND(SSL_get_error);
  FIND(SSL_pending);
  FIND(SSL_get_verify_result);
  FIND(X509_verify_cert_error_string);
  FIND(SSL_export_keying_material);
  FIND(ERR_peek_last_error);
  FIND(ERR_error_string_n);
  FIND(ERR_clear_error);
#undef FIND
  return ssl;
}

const OpenSsl& Ssl() {
  static const OpenSsl ssl = Load();
  return ssl;
}

/// Returns OpenSSL's text for the last error of this thread.
std::string Reason() {
  char text[256] = "no reason is known";
  if (const unsigned long code = Ssl().ERR_peek_last_error()) {
    Ssl().ERR_error_string_n(code, text, sizeof(text));
  }
  return text;
}

}  // namespace

TlsSession::TlsSession(void* context, int descriptor, bool accepts)
    : session_(Ssl().SSL_new(context)) {
  if (session_ == nullptr || Ssl().SSL_set_fd(session_, descriptor) != 1) {
    throw std::runtime_error("TLS: " + Reason());
  }
  (accepts ? Ssl().SSL_set_accept_state : Ssl().SSL_set_connect_state)(session_);
}

TlsSession::~TlsSession() { Ssl().SSL_free(session_); }

int TlsSession::ShakeHands() {
  Ssl().ERR_clear_error();
  const ssize_t result = Result(Ssl().SSL_do_handshake(session_));
  const long verified = Ssl().SSL_get_verify_result(session_);
  if (verified != 0) {
    error_ =
        std::string("its certificate is refused: ") + Ssl().X509_verify_cert_error_string(verified);
  }
  return static_cast<int>(result);
}

ssize_t TlsSession::Read(void* data, size_t bytes) {
  Ssl().ERR_clear_error();
  return Result(Ssl().SSL_read(session_, data, static_cast<int>(std::min<size_t>(bytes, INT_MAX))));
}

ssize_t TlsSession::Write(const void* data, size_t bytes) {
  Ssl().ERR_clear_error();
  return Result(
      Ssl().SSL_write(session_, data, static_cast<int>(std::min<size_t>(bytes, INT_MAX))));
}

bool TlsSession::HasUnread() const { return Ssl().SSL_pending(session_) > 0; }

/// Converts the result of a call of OpenSSL to that of a socket: a number of bytes, 0 at the end of
/// the connection, or -1 with errno for an error.
ssize_t TlsSession::Result(int result) {
  const int system_error = errno;
  wants_to_write_ = false;
  if (result > 0) return result;
  const int kind = Ssl().SSL_get_error(session_, result);
  if (kind == kEnd) return 0;
  wants_to_write_ = kind == kWantWrite;
  if (kind == kWantRead || kind == kWantWrite) {
    errno = EAGAIN;
    return -1;
  }
  error_ = Reason();
  errno = system_error == 0 || system_error == EAGAIN ? EPROTO : system_error;
  return -1;
}

std::string TlsSession::Binding() const {
  unsigned char bytes[32];
  if (Ssl().SSL_export_keying_material(session_, bytes, sizeof(bytes), kLabel, sizeof(kLabel) - 1,
                                       nullptr, 0, 0) != 1) {
    throw std::runtime_error("TLS: " + Reason());
  }
  return {reinterpret_cast<const char*>(bytes), sizeof(bytes)};
}

std::shared_ptr<Tls> Tls::FromEnvironment() {
  const char* const folder = std::getenv("ONNXPAR_TLS_DIR");
  if (folder == nullptr || *folder == '\0') return nullptr;
  return std::make_shared<Tls>(folder);
}

Tls::Tls(const std::string& folder) : context_(Ssl().SSL_CTX_new(Ssl().TLS_method())) {
  const auto check = [&](int result, const std::string& file) {
    if (result == 1) return;
    const std::string path = folder + "/" + file;
    const std::string reason =
        access(path.c_str(), R_OK) == 0 ? Reason() : std::string(std::strerror(errno));
    Ssl().SSL_CTX_free(context_);
    throw std::runtime_error(
        "TLS cannot use " + path + ": " + reason + "; the folder must have ca.crt, " +
        "the certificate of the authority, tls.crt, that of this host, and tls.key, its key");
  };
  const std::string ca = folder + "/ca.crt", own = folder + "/tls.crt", key = folder + "/tls.key";
  Ssl().ERR_clear_error();
  Ssl().SSL_CTX_ctrl(context_, kCtrlMinVersion, kTls13, nullptr);
  Ssl().SSL_CTX_ctrl(context_, kCtrlMode, kPartialWrites | kMovingBuffers, nullptr);
  Ssl().SSL_CTX_set_num_tickets(context_, 0);
  Ssl().SSL_CTX_set_verify(context_, kVerifyPeer | kFailWithoutCertificate, nullptr);
  check(Ssl().SSL_CTX_load_verify_locations(context_, ca.c_str(), nullptr), "ca.crt");
  check(Ssl().SSL_CTX_use_certificate_chain_file(context_, own.c_str()), "tls.crt");
  check(Ssl().SSL_CTX_use_PrivateKey_file(context_, key.c_str(), kPem), "tls.key");
  check(Ssl().SSL_CTX_check_private_key(context_), "tls.key");
}

Tls::~Tls() { Ssl().SSL_CTX_free(context_); }

std::unique_ptr<TlsSession> Tls::NewSession(int descriptor, bool accepts) const {
  return std::make_unique<TlsSession>(context_, descriptor, accepts);
}

}  // namespace onnxpar
