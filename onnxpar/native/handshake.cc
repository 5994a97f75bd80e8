#include "handshake.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "key.h"
#include "sha256.h"

namespace onnxpar {
namespace {

constexpr char kMagic[] = "onnxpar4";
constexpr size_t kMagicBytes = 8;
constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = 32;
constexpr size_t kLongestIdentity = 255;

/// Concatenates fields, each after its length, so that different lists of fields never give the
/// same bytes.
std::string Joined(const std::vector<std::string>& fields) {
  std::string all;
  for (const std::string& field : fields) all += std::to_string(field.size()) + ":" + field;
  return all;
}

}  // namespace

Credentials CredentialsOf(std::string key) { return {std::move(key), Tls::FromEnvironment()}; }

void CheckExposure(const Address& address, const Credentials& credentials) {
  const char* const insecure = std::getenv("ONNXPAR_INSECURE");
  if (credentials.tls || (insecure != nullptr && std::string(insecure) == "1")) return;
  if (IsLoopback(address)) return;
  throw std::runtime_error(
      "other hosts can reach " + address.host +
      ", and connections would not be encrypted: set "
      "ONNXPAR_TLS_DIR (--tls-dir) to a folder of certificates on all ranks, or, in a network that "
      "you trust, ONNXPAR_INSECURE=1 (--insecure)");
}

Handshake::Handshake(TcpSocket socket, const Credentials& credentials, std::string purpose,
                     std::string identity, bool accepts)
    : socket_(std::move(socket)),
      key_(credentials.key),
      purpose_(std::move(purpose)),
      identity_(std::move(identity)),
      accepts_(accepts),
      step_(accepts ? Step::kEncrypt : Step::kConnect),
      events_(accepts ? POLLIN : POLLOUT),
      own_nonce_(RandomBytes(kNonceBytes)) {
  if (!socket_.open()) Fail(std::strerror(errno));
  if (!credentials.tls || !socket_.open()) return;
  socket_.Encrypt(credentials.tls->NewSession(socket_.descriptor(), accepts));
}

Handshake Handshake::Accepts(TcpSocket socket, const Credentials& credentials,
                             std::string purpose) {
  return {std::move(socket), credentials, std::move(purpose), "", /*accepts=*/true};
}

Handshake Handshake::Connects(TcpSocket socket, const Credentials& credentials, std::string purpose,
                              std::string identity) {
  return {std::move(socket), credentials, std::move(purpose), std::move(identity),
          /*accepts=*/false};
}

Handshake::State Handshake::Advance() {
  while (state_ == State::kUnderWay && Next()) {
    step_ = static_cast<Step>(static_cast<int>(step_) + 1);
    incoming_.clear();
    if (step_ == Step::kDone) state_ = State::kDone;
  }
  return state_;
}

/// Continues the current step; returns true if it is complete, false if it has to wait or has
/// failed.
bool Handshake::Next() {
  switch (step_) {
    case Step::kConnect:
      return FinishConnect();
    case Step::kEncrypt:
      return Encrypt();
    case Step::kChallenge:
      return accepts_ ? SendChallenge() : ReadChallenge();
    case Step::kProve:
      return accepts_ ? Check() : Prove();
    case Step::kConfirm:
      return accepts_ ? Confirm() : ReadConfirmation();
    case Step::kDone:
      break;
  }
  return false;
}

bool Handshake::FinishConnect() {
  pollfd now{socket_.descriptor(), POLLOUT, 0};
  if (poll(&now, 1, 0) == 0) return false;
  const int error = socket_.ConnectError();
  return error == 0 || Fail(std::strerror(error));
}

bool Handshake::Encrypt() {
  if (socket_.tls() == nullptr) return true;
  if (!Wait(socket_.tls()->ShakeHands())) return false;
  binding_ = socket_.tls()->Binding();
  return true;
}

bool Handshake::SendChallenge() {
  if (outgoing_.empty()) outgoing_ = std::string(kMagic, kMagicBytes) + own_nonce_;
  return Write();
}

bool Handshake::ReadChallenge() {
  if (!Read(kMagicBytes + kNonceBytes)) return false;
  if (incoming_.compare(0, kMagicBytes, kMagic, kMagicBytes) != 0) {
    return Fail("what answers there is not this version of onnxpar");
  }
  other_nonce_ = incoming_.substr(kMagicBytes);
  return true;
}

bool Handshake::Prove() {
  if (outgoing_.empty()) {
    outgoing_ = own_nonce_ + static_cast<char>(identity_.size()) + identity_ + Proof("connects");
  }
  return Write();
}

bool Handshake::Check() {
  if (!Read(kNonceBytes + 1)) return false;
  const auto length = static_cast<unsigned char>(incoming_[kNonceBytes]);
  if (!Read(kNonceBytes + 1 + length + kProofBytes)) return false;
  other_nonce_ = incoming_.substr(0, kNonceBytes);
  identity_ = incoming_.substr(kNonceBytes + 1, length);
  const std::string proof = incoming_.substr(incoming_.size() - kProofBytes);
  return SameKey(proof, Proof("connects")) || Fail("another key");
}

bool Handshake::Confirm() {
  if (outgoing_.empty()) outgoing_ = Proof("accepts");
  return Write();
}

bool Handshake::ReadConfirmation() {
  if (!Read(kProofBytes)) return false;
  return SameKey(incoming_, Proof("accepts")) || Fail("another key");
}

/// Returns the MAC by which the end with this role ("accepts" or "connects") proves that it has the
/// key.
std::string Handshake::Proof(const char* role) const {
  const std::string& first = accepts_ ? own_nonce_ : other_nonce_;
  const std::string& second = accepts_ ? other_nonce_ : own_nonce_;
  return HmacSha256(key_, Joined({role, purpose_, first, second, identity_, binding_}));
}

bool Handshake::Write() {
  while (!outgoing_.empty()) {
    const ssize_t count = socket_.Write(outgoing_.data(), outgoing_.size());
    if (!Wait(count)) {
      if (state_ == State::kUnderWay) events_ = POLLOUT;
      return false;
    }
    outgoing_.erase(0, static_cast<size_t>(count));
  }
  return true;
}

/// Reads until `incoming_` has `bytes` bytes; returns true when it has. Never reads more, because
/// later bytes belong to the owner of the connection.
bool Handshake::Read(size_t bytes) {
  char buffer[kNonceBytes + 1 + kLongestIdentity + kProofBytes];
  while (incoming_.size() < bytes) {
    const ssize_t count = socket_.Read(buffer, bytes - incoming_.size());
    if (!Wait(count)) return false;
    incoming_.append(buffer, static_cast<size_t>(count));
  }
  return true;
}

/// Handles the result of a call that reads or writes. Returns true if it made progress. Else
/// returns false: sets the events to wait for, or fails the handshake.
bool Handshake::Wait(ssize_t result) {
  if (result > 0) return true;
  if (result == 0) return Fail("the connection was closed");
  const bool waits = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (!waits && socket_.tls() != nullptr) return Fail(socket_.tls()->error());
  if (!waits) return Fail(std::strerror(errno));
  events_ = socket_.tls() != nullptr && socket_.tls()->wants_to_write() ? POLLOUT : POLLIN;
  return false;
}

bool Handshake::Fail(const std::string& error) {
  state_ = State::kFailed;
  error_ = error;
  return false;
}

}  // namespace onnxpar
