#include "rendezvous.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include "key.h"

namespace onnxpar {
namespace {

bool TakePrefix(const std::string& prefix, std::string* text) {
  if (text->compare(0, prefix.size(), prefix) != 0) return false;
  text->erase(0, prefix.size());
  return true;
}

/// A rendezvous of ranks that are threads of this process.
class InProcess : public Rendezvous {
 public:
  InProcess(std::string name, std::string host) : name_(std::move(name)), host_(std::move(host)) {}

  std::shared_ptr<Hub> Serve() override {
    std::shared_ptr<Hub> hub = Hub::Start({host_, 0}, RandomKey(), 0);
    std::lock_guard<std::mutex> lock(mutex);
    Hubs()[name_] = hub;
    return hub;
  }

  std::optional<HubAddress> Find() override {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = Hubs().find(name_);
    const auto hub = found == Hubs().end() ? nullptr : found->second.lock();
    if (!hub) return std::nullopt;
    return HubAddress{hub->address(), hub->key()};
  }

  void Withdraw() override {
    std::lock_guard<std::mutex> lock(mutex);
    Hubs().erase(name_);
  }

 private:
  static std::map<std::string, std::weak_ptr<Hub>>& Hubs() {
    static auto* hubs = new std::map<std::string, std::weak_ptr<Hub>>;
    return *hubs;
  }

  static std::mutex mutex;
  const std::string name_;
  const std::string host_;
};
std::mutex InProcess::mutex;

/// A rendezvous by a file in a directory that all ranks share. Rank 0 writes the hub's address and
/// a random key to the file, which only its owner may read. A rank trusts the file only if it
/// belongs to its own user or to the directory's owner.
class Directory : public Rendezvous {
 public:
  Directory(const std::string& path, std::string host)
      : directory_(path), file_(path + "/onnxpar-hub"), host_(std::move(host)) {
    if (path.empty() || path[0] != '/') {
      throw std::runtime_error("store 'file:" + path + "' must name an absolute path");
    }
  }

  std::shared_ptr<Hub> Serve() override {
    if (mkdir(directory_.c_str(), 0700) != 0 && errno != EEXIST) ThrowErrno("create", directory_);
    std::shared_ptr<Hub> hub = Hub::Start({host_, 0}, RandomKey(), 0);
    // Written under another name and then renamed, so that no process reads an incomplete file.
    const std::string draft = file_ + "." + std::to_string(getpid());
    if (!Write(draft, *hub) || std::rename(draft.c_str(), file_.c_str()) != 0) {
      const int error = errno;
      unlink(draft.c_str());
      hub->Stop();
      errno = error;
      ThrowErrno("write", file_);
    }
    return hub;
  }

  std::optional<HubAddress> Find() override {
    struct stat file{}, directory{};
    if (lstat(file_.c_str(), &file) != 0) return std::nullopt;
    stat(directory_.c_str(), &directory);
    if (file.st_uid != geteuid() && file.st_uid != directory.st_uid) {
      throw std::runtime_error(file_ + " belongs to user " + std::to_string(file.st_uid) +
                               "; use a folder of your own");
    }
    HubAddress found;
    std::ifstream text(file_);
    if (!(text >> found.address.host >> found.address.port >> found.key)) return std::nullopt;
    return found;
  }

  void Withdraw() override { unlink(file_.c_str()); }

 private:
  static bool Write(const std::string& path, const Hub& hub) {
    unlink(path.c_str());
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return false;
    const std::string text =
        hub.address().host + " " + std::to_string(hub.address().port) + " " + hub.key() + "\n";
    const bool written = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    return close(file) == 0 && written;
  }

  [[noreturn]] static void ThrowErrno(const char* action, const std::string& path) {
    throw std::runtime_error(std::string("cannot ") + action + " " + path + ": " +
                             std::strerror(errno));
  }

  const std::string directory_;
  const std::string file_;
  const std::string host_;
};

/// A rendezvous at a known address, optionally followed by # and a key. Rank 0 serves the hub
/// there, unless another process already does. If the text after # is too short for a key, it only
/// distinguishes worlds, and ONNXPAR_KEY is the key. An address that other hosts can reach requires
/// a key.
class KnownAddress : public Rendezvous {
 public:
  explicit KnownAddress(std::string text) {
    const size_t hash = text.find('#');
    if (hash != std::string::npos) {
      where_.key = text.substr(hash + 1);
      text.erase(hash);
    }
    const size_t colon = text.rfind(':');
    const int port = colon == std::string::npos ? 0 : PortOf(text.substr(colon + 1));
    if (port == 0) throw std::runtime_error("store 'tcp://" + text + "' must be tcp://host:port");
    where_.address = {text.substr(0, colon), port};
    if (where_.key.size() >= kShortestKey) return;
    const std::string secret = KeyFromEnvironment();
    if (!secret.empty()) where_.key = secret + "#" + where_.key;
    if (secret.empty() && !IsLoopback(where_.address)) {
      throw std::runtime_error(
          "store tcp://" + text + " can be reached from other hosts, so it needs a key: set " +
          "ONNXPAR_KEY to the same secret on all ranks (openssl rand -hex 16 makes one), or use " +
          "file:/dir, a folder that all ranks can read, in which rank 0 writes a key");
    }
  }

  std::shared_ptr<Hub> Serve() override {
    try {
      return Hub::Start(where_.address, where_.key, 0);
    } catch (const std::system_error& error) {
      const bool elsewhere =
          error.code() == std::errc::address_in_use ||       // by a launcher or an old world
          error.code() == std::errc::address_not_available;  // on another host
      if (elsewhere) return nullptr;
      throw;
    }
  }

  std::optional<HubAddress> Find() override { return where_; }

 private:
  /// Returns the port; 0 if the text is not a port.
  static int PortOf(const std::string& text) {
    const bool digits = !text.empty() && text.size() <= 5 &&
                        text.find_first_not_of("0123456789") == std::string::npos;
    const int port = digits ? std::atoi(text.c_str()) : 0;
    return port <= 65535 ? port : 0;
  }

  HubAddress where_;
};

}  // namespace

std::unique_ptr<Rendezvous> Rendezvous::Open(const std::string& store,
                                             const std::string& bind_address) {
  std::string rest = store;
  if (TakePrefix("hash:", &rest)) return std::make_unique<InProcess>(rest, bind_address);
  if (TakePrefix("file:", &rest)) return std::make_unique<Directory>(rest, bind_address);
  if (TakePrefix("tcp://", &rest)) return std::make_unique<KnownAddress>(rest);
  throw std::runtime_error("store '" + store + "' must be hash:NAME, file:/dir or tcp://host:port");
}

}  // namespace onnxpar
