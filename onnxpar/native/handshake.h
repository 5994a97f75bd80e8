// The handshake at the beginning of a connection, in which each end proves that it has the key, the
// secret that the ranks of a world share.
#pragma once

#include <poll.h>

#include <memory>
#include <string>

#include "tcp_socket.h"

namespace onnxpar {

/// The key of a world, and the TLS settings of its connections.
struct Credentials {
  std::string key;
  std::shared_ptr<Tls> tls;  // null: connections are not encrypted
};

/// Returns the credentials with this key, and with the certificates in the folder that
/// ONNXPAR_TLS_DIR names, if it is set.
Credentials CredentialsOf(std::string key);

/// Throws std::runtime_error if other hosts can reach `address` and connections there would not be
/// encrypted, unless ONNXPAR_INSECURE=1 allows this.
void CheckExposure(const Address& address, const Credentials& credentials);

/// One end of the handshake of a connection; its methods never block.
///
///   1. If TLS is requested, a TLS handshake.
///   2. The accepting end sends a nonce (a random number that is used once).
///   3. The connecting end sends its own nonce, its identity, and a MAC of all these by the key.
///   4. The accepting end checks the MAC, and answers with its own MAC, which the other end checks.
///
/// Nonces make recorded messages useless. The MACs cover a secret of the TLS session, so nobody can
/// pass messages on from one session to another. A process without the key learns nothing from
/// which to guess it.
class Handshake {
 public:
  enum class State { kUnderWay, kDone, kFailed };

  /// Begins the handshake of the accepting end. `purpose` names its service, e.g. "hub"; it fails
  /// unless the connecting end expects the same service.
  static Handshake Accepts(TcpSocket socket, const Credentials& credentials, std::string purpose);
  /// Begins the handshake of the connecting end, which sends `identity`, e.g. its rank.
  static Handshake Connects(TcpSocket socket, const Credentials& credentials, std::string purpose,
                            std::string identity);

  /// Continues as far as possible without waiting, and returns the new state. Call it again once
  /// the descriptor has one of events().
  State Advance();
  /// Returns the events of poll for which the handshake waits.
  short events() const { return events_; }
  int descriptor() const { return socket_.descriptor(); }
  /// True once the TCP connection is established.
  bool connected() const { return step_ != Step::kConnect; }
  /// Returns the identity that the connecting end has sent; trust it only when the handshake is
  /// done.
  const std::string& identity() const { return identity_; }
  /// Returns the reason why the handshake failed.
  const std::string& error() const { return error_; }
  /// Returns the connection; call it once, when the handshake is done.
  TcpSocket Take() { return std::move(socket_); }

 private:
  enum class Step { kConnect, kEncrypt, kChallenge, kProve, kConfirm, kDone };

  Handshake(TcpSocket socket, const Credentials& credentials, std::string purpose,
            std::string identity, bool accepts);

  bool Next();
  bool FinishConnect();
  bool Encrypt();
  bool SendChallenge();
  bool ReadChallenge();
  bool Prove();
  bool Check();
  bool Confirm();
  bool ReadConfirmation();
  bool Write();
  bool Read(size_t bytes);
  bool Wait(ssize_t result);
  bool Fail(const std::string& error);
  std::string Proof(const char* role) const;

  TcpSocket socket_;
  std::string key_;
  std::string purpose_;
  std::string identity_;
  bool accepts_;
  Step step_;
  State state_ = State::kUnderWay;
  short events_ = POLLIN;
  std::string own_nonce_;
  std::string other_nonce_;
  std::string binding_;   // of TLS
  std::string incoming_;  // of this step
  std::string outgoing_;
  std::string error_;
};

}  // namespace onnxpar
