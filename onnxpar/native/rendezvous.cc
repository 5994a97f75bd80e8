#include "rendezvous.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <system_error>

namespace onnxpar {
namespace {

bool TakePrefix(const std::string& prefix, std::string* text) {
  if (text->compare(0, prefix.size(), prefix) != 0) return false;
  text->erase(0, prefix.size());
  return true;
}

/// Ranks that are threads of this process.
class InProcess : public Rendezvous {
 public:
  InProcess(std::string name, std::string host) : name_(std::move(name)), host_(std::move(host)) {}

  std::shared_ptr<Hub> Serve() override {
    std::shared_ptr<Hub> hub = Hub::Start({host_, 0}, name_, 0);
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

/// A file in a directory that all ranks see, written anew for each world.
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
    std::random_device random;
    const std::string key = std::to_string(random()) + std::to_string(random());
    std::shared_ptr<Hub> hub = Hub::Start({host_, 0}, key, 0);
    // Written aside and renamed, so that nobody reads half of it.
    const std::string draft = file_ + "." + std::to_string(getpid());
    std::ofstream(draft) << hub->address().host << ' ' << hub->address().port << ' ' << key << '\n';
    if (std::rename(draft.c_str(), file_.c_str()) != 0) {
      hub->Stop();
      ThrowErrno("write", file_);
    }
    return hub;
  }

  std::optional<HubAddress> Find() override {
    HubAddress found;
    std::ifstream file(file_);
    if (!(file >> found.address.host >> found.address.port >> found.key)) return std::nullopt;
    return found;
  }

  void Withdraw() override { unlink(file_.c_str()); }

 private:
  [[noreturn]] static void ThrowErrno(const char* action, const std::string& path) {
    throw std::runtime_error(std::string("cannot ") + action + " " + path + ": " +
                             std::strerror(errno));
  }

  const std::string directory_;
  const std::string file_;
  const std::string host_;
};

/// A known address, behind which # may stand a key; rank 0 serves there unless somebody already
/// does.
class KnownAddress : public Rendezvous {
 public:
  explicit KnownAddress(std::string text) {
    const size_t hash = text.find('#');
    if (hash != std::string::npos) {
      where_.key = text.substr(hash + 1);
      text.erase(hash);
    }
    const size_t colon = text.rfind(':');
    if (colon == std::string::npos || std::atoi(text.c_str() + colon + 1) <= 0) {
      throw std::runtime_error("store 'tcp://" + text + "' must be tcp://host:port");
    }
    where_.address = {text.substr(0, colon), std::atoi(text.c_str() + colon + 1)};
  }

  std::shared_ptr<Hub> Serve() override {
    try {
      return Hub::Start(where_.address, where_.key, 0);
    } catch (const std::system_error& error) {
      const bool elsewhere =
          error.code() == std::errc::address_in_use ||       // by a launcher, or by an old world
          error.code() == std::errc::address_not_available;  // on another host
      if (elsewhere) return nullptr;
      throw;
    }
  }

  std::optional<HubAddress> Find() override { return where_; }

 private:
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
