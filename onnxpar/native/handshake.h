// What the two ends of a new connection do first: each proves that it has the key of the world.
#pragma once

#include <poll.h>

#include <memory>
#include <string>

#include "tcp_socket.h"

namespace onnxpar {

/// The secret of a world, and what its connections need besides.
struct Credentials {
  std::string key;
  std::shared_ptr<Tls> tls;  // null: connections are not encrypted
};

/// Returns the credentials of a key. Reads the certificates that ONNXPAR_TLS_DIR names.
Credentials CredentialsOf(std::string key);

/// Throws std::runtime_error if other hosts can reach `address`, unless connections are encrypted
/// or ONNXPAR_INSECURE=1 allows that they are not.
void CheckExposure(const Address& address, const Credentials& credentials);

/// The handshake of one end of a connection, which never blocks.
///
/// First TLS, if it is asked for. Then the end that accepted sends a nonce; the one that connects
/// sends a nonce, its identity, and a MAC of both nonces and the identity by the key; the first
/// checks it, and answers with a MAC of its own. Nonces make what was recorded useless. The MACs
/// cover what only these two ends of a TLS session know, so nobody can pass messages on from one
/// session to another. A stranger learns nothing from which the key could be guessed.
class Handshake {
 public:
  enum class State { kUnderWay, kDone, kFailed };

  /// The end that accepts. `purpose` says what listens; the other end must expect it.
  static Handshake Accepts(TcpSocket socket, const Credentials& credentials, std::string purpose);
  /// The end that connects, which tells who it is.
  static Handshake Connects(TcpSocket socket, const Credentials& credentials, std::string purpose,
                            std::string identity);

  /// Goes on as far as it can without waiting.
  State Advance();
  /// The events of poll that let it go on.
  short events() const { return events_; }
  int descriptor() const { return socket_.descriptor(); }
  /// True once there is a TCP connection.
  bool connected() const { return step_ != Step::kConnect; }
  /// Who the end that connects says it is; proved once the handshake is done.
  const std::string& identity() const { return identity_; }
  /// Why it has failed.
  const std::string& error() const { return error_; }
  /// Returns the connection, once the handshake is done.
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
