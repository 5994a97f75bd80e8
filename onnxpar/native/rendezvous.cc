#include "rendezvous.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include "key.h"
#include "pmix.h"

namespace onnxpar {
namespace {

bool TakePrefix(const std::string& prefix, std::string* text) {
  if (text->compare(0, prefix.size(), prefix) != 0) return false;
  text->erase(0, prefix.size());
  return true;
}

/// Returns the address on which the hub listens, with a free port: on all interfaces if
/// `bind_address` is empty.
Address Listening(const std::string& bind_address) {
  return {bind_address.empty() ? "0.0.0.0" : bind_address, 0};
}

/// Returns the addresses by which ranks, on this host or others, may reach a hub.
std::vector<Address> Reachable(const Hub& hub) {
  const Address& address = hub.address();
  if (address.host != "0.0.0.0") return {address};
  std::vector<Address> all;
  for (const std::string& host : HostAddresses()) all.push_back({host, address.port});
  all.push_back({"127.0.0.1", address.port});
  return all;
}

/// A hub in this process, and what other processes need to join it: its addresses and a random key.
/// If ONNXPAR_KEY is set, it is put before the random key.
struct Served {
  std::shared_ptr<Hub> hub;
  HubAddress where;
};

Served ServeAt(const std::string& bind_address) {
  const std::string secret = KeyFromEnvironment();
  const std::string key = RandomKey();
  const auto hub = Hub::Start(Listening(bind_address), CredentialsOf(secret + key), 0);
  return {hub, {Reachable(*hub), key}};
}

/// Returns the text that Serve publishes: the key, the port and the hosts of a hub, separated by
/// spaces.
std::string TextOf(const HubAddress& where) {
  std::string text = where.key + " " + std::to_string(where.addresses.front().port);
  for (const Address& each : where.addresses) text += " " + each.host;
  return text;
}

/// The inverse of TextOf. Returns none for a text that is not complete.
std::optional<HubAddress> HubOf(const std::string& text) {
  std::istringstream words(text);
  HubAddress found;
  Address address;
  if (!(words >> found.key >> address.port)) return std::nullopt;
  while (words >> address.host) found.addresses.push_back(address);
  found.key.insert(0, KeyFromEnvironment());
  return found;
}

/// The store hash:NAME, for ranks that are threads of this process.
class InProcess : public Rendezvous {
 public:
  InProcess(std::string name, std::string host) : name_(std::move(name)), host_(std::move(host)) {}

  std::shared_ptr<Hub> Serve() override {
    const Served served = ServeAt(host_);
    std::lock_guard<std::mutex> lock(mutex);
    Hubs()[name_] = {served.hub, TextOf(served.where)};
    return served.hub;
  }

  std::optional<HubAddress> Find() override {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = Hubs().find(name_);
    const auto hub = found == Hubs().end() ? nullptr : found->second.hub.lock();
    if (!hub) return std::nullopt;
    return HubOf(found->second.text);
  }

  void Withdraw() override {
    std::lock_guard<std::mutex> lock(mutex);
    Hubs().erase(name_);
  }

 private:
  struct Known {
    std::weak_ptr<Hub> hub;
    std::string text;
  };

  static std::map<std::string, Known>& Hubs() {
    static auto* hubs = new std::map<std::string, Known>;
    return *hubs;
  }

  static std::mutex mutex;
  const std::string name_;
  const std::string host_;
};
std::mutex InProcess::mutex;

/// The store file:/dir: a directory that all ranks share. Rank 0 writes a random key and the hub's
/// addresses to a file that only its owner may read. A rank trusts the file only if it belongs to
/// the rank's own user or to the directory's owner.
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
    const Served served = ServeAt(host_);
    // Written under another name and then renamed, so that no process reads an incomplete file.
    const std::string draft = file_ + "." + std::to_string(getpid());
    if (!Write(draft, TextOf(served.where) + "\n") ||
        std::rename(draft.c_str(), file_.c_str()) != 0) {
      const int error = errno;
      unlink(draft.c_str());
      served.hub->Stop();
      errno = error;
      ThrowErrno("write", file_);
    }
    return served.hub;
  }

  std::optional<HubAddress> Find() override {
    struct stat file{}, directory{};
    if (lstat(file_.c_str(), &file) != 0) return std::nullopt;
    stat(directory_.c_str(), &directory);
    if (file.st_uid != geteuid() && file.st_uid != directory.st_uid) {
      throw std::runtime_error(file_ + " belongs to user " + std::to_string(file.st_uid) +
                               "; use a folder of your own");
    }
    std::ifstream file_text(file_);
    std::ostringstream text;
    text << file_text.rdbuf();
    return HubOf(text.str());
  }

  void Withdraw() override { unlink(file_.c_str()); }

 protected:
  const std::string directory_;

 private:
  static bool Write(const std::string& path, const std::string& text) {
    unlink(path.c_str());
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return false;
    const bool written = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    return close(file) == 0 && written;
  }

  [[noreturn]] static void ThrowErrno(const char* action, const std::string& path) {
    throw std::runtime_error(std::string("cannot ") + action + " " + path + ": " +
                             std::strerror(errno));
  }

  const std::string file_;
  const std::string host_;
};

/// The store job:NAME, for processes of one user on one host that know the name of their job: a
/// directory of temporary files that belongs to this user alone, so that no other user can put a
/// hub there.
class OwnDirectory : public Directory {
 public:
  OwnDirectory(const std::string& job, std::string host) : Directory(PathOf(job), std::move(host)) {
    mkdir(directory_.c_str(), 0700);
    struct stat found{};
    const bool is_own = lstat(directory_.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
                        found.st_uid == geteuid() && (found.st_mode & 0077) == 0;
    if (is_own) return;
    throw std::runtime_error(directory_ +
                             " is not a folder of this user alone; remove it, or set "
                             "ONNXPAR_STORE to file:/dir, a folder of your own");
  }

  void Withdraw() override {
    Directory::Withdraw();
    rmdir(directory_.c_str());
  }

 private:
  static std::string PathOf(const std::string& job) {
    const char* const folder = std::getenv("TMPDIR");
    const std::string parent = folder == nullptr || *folder != '/' ? "/tmp" : folder;
    std::string name = job;
    for (char& each : name) each = each == '/' ? '-' : each;
    return parent + "/onnxpar-" + std::to_string(geteuid()) + "-" + name;
  }
};

/// The store pmix: the launcher of all ranks passes the hub's addresses on. An entry cannot be
/// replaced, because hosts keep copies of it. So each world of a process has an entry of its own,
/// with a number that is the same on all ranks.
class ByPmix : public Rendezvous {
 public:
  explicit ByPmix(std::string host) : host_(std::move(host)) {
    static std::atomic<int> worlds{0};
    name_ = "onnxpar.hub." + std::to_string(worlds++);
  }

  std::shared_ptr<Hub> Serve() override {
    const Served served = ServeAt(host_);
    pmix_.Publish(name_, TextOf(served.where));
    own_ = HubOf(TextOf(served.where));
    return served.hub;
  }

  std::optional<HubAddress> Find() override {
    if (own_) return own_;
    const auto text = pmix_.Find(0, name_, std::chrono::seconds(1));
    return text ? HubOf(*text) : std::nullopt;
  }

 private:
  Pmix pmix_;
  const std::string host_;
  std::string name_;
  std::optional<HubAddress> own_;
};

/// The store tcp://host:port, optionally with #key. Rank 0 serves the hub there, unless another
/// process already does. If the text after # is too short for a key, it only distinguishes worlds,
/// and ONNXPAR_KEY is the key.
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
    where_.addresses = {{text.substr(0, colon), port}};
    if (where_.key.size() >= kShortestKey) return;
    const std::string secret = KeyFromEnvironment();
    if (secret.empty()) {
      throw std::runtime_error(
          "store tcp://" + text + " needs a key: set ONNXPAR_KEY to the same secret on all ranks " +
          "(openssl rand -hex 16 makes one), or use file:/dir, a folder that all ranks can read, " +
          "in which rank 0 writes a key");
    }
    where_.key = secret + "#" + where_.key;
  }

  std::shared_ptr<Hub> Serve() override {
    try {
      return Hub::Start(where_.addresses.front(), CredentialsOf(where_.key), 0);
    } catch (const std::system_error& error) {
      const bool elsewhere =
          error.code() == std::errc::address_in_use ||       // by a launcher or an old world
          error.code() == std::errc::address_not_available;  // on another host
      if (elsewhere) return nullptr;
      throw;
    } catch (const UnknownHost&) {
      return nullptr;
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
  if (TakePrefix("job:", &rest)) return std::make_unique<OwnDirectory>(rest, bind_address);
  if (rest == "pmix:") return std::make_unique<ByPmix>(bind_address);
  if (TakePrefix("tcp://", &rest)) return std::make_unique<KnownAddress>(rest);
  throw std::runtime_error("store '" + store + "' must be hash:NAME, file:/dir or tcp://host:port");
}

}  // namespace onnxpar
