// The handshake at the beginning of a connection: each end proves that it has the key of the world.
#pragma once

#include <poll.h>

#include <memory>
#include <string>

#include "tcp_socket.h"

namespace onnxpar {

/// The secret of a world, and the TLS settings of its connections.
struct Credentials {
  std::string key;
  std::shared_ptr<Tls> tls;  // null: connections are not encrypted
};

/// Returns the credentials of a key. Reads the certificates that ONNXPAR_TLS_DIR names.
Credentials CredentialsOf(std::string key);

/// Throws std::runtime_error if other hosts can reach `address`, unless connections are encrypted
/// or ONNXPAR_INSECURE=1 allows connections without encryption.
void CheckExposure(const Address& address, const Credentials& credentials);

/// The handshake of one end of a connection; its methods never block.
///
/// It begins with TLS, if TLS is requested. Then the end that accepted sends a nonce. The end that
/// connects sends a nonce, its identity, and a MAC of both nonces and the identity by the key. The
/// end that accepted checks this MAC, and answers with its own. Nonces make recorded messages
/// useless. The MACs cover a secret of the two ends of the TLS session, so nobody can pass messages
/// on from one session to another. A stranger learns nothing from which to guess the key.
class Handshake {
 public:
  enum class State { kUnderWay, kDone, kFailed };

  /// Begins the handshake of the end that accepts. `purpose` names the listening service; the other
  /// end must expect the same service.
  static Handshake Accepts(TcpSocket socket, const Credentials& credentials, std::string purpose);
  /// Begins the handshake of the end that connects and sends its identity.
  static Handshake Connects(TcpSocket socket, const Credentials& credentials, std::string purpose,
                            std::string identity);

  /// Continues as far as possible without waiting.
  State Advance();
  /// The events of poll for which the handshake waits.
  short events() const { return events_; }
  int descriptor() const { return socket_.descriptor(); }
  /// True once there is a TCP connection.
  bool connected() const { return step_ != Step::kConnect; }
  /// The identity that the end that connects has sent; proved once the handshake is done.
  const std::string& identity() const { return identity_; }
  /// The reason of the failure.
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
