#include "environment.h"

#include <cmath>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

namespace onnxpar {
namespace {

/// The first of these variables that is set, or an empty string.
std::string Variable(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "";
}

double Number(const char* name, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (!text.empty() && *end == '\0') return value;
  throw std::runtime_error(std::string(name) + "='" + text + "' is not a number");
}

/// On one host, mpirun gives its processes a directory of their own.
std::string StoreOfMpirun() {
  const std::string directory = Variable({"PMIX_SERVER_TMPDIR"});
  return directory.empty() ? "" : "file:" + directory + "/onnxpar";
}

WorldConfig ConfigFromEnvironment(const std::string& rank) {
  const std::string size = Variable({"ONNXPAR_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"});
  const std::string timeout = Variable({"ONNXPAR_TIMEOUT"});
  const std::string bind = Variable({"ONNXPAR_BIND"});
  WorldConfig config;
  config.id = "environment";
  config.rank = static_cast<int>(Number("ONNXPAR_RANK", rank));
  config.size = static_cast<int>(Number("ONNXPAR_WORLD_SIZE", size));
  config.store = Variable({"ONNXPAR_STORE"});
  if (config.store.empty()) config.store = StoreOfMpirun();
  config.bind_address = bind.empty() ? "127.0.0.1" : bind;
  if (!timeout.empty()) {
    config.timeout =
        std::chrono::milliseconds(std::lround(1000 * Number("ONNXPAR_TIMEOUT", timeout)));
  }
  if (config.store.empty() && config.size > 1) {
    throw std::runtime_error("ONNXPAR_STORE is not set; use file:/dir or tcp://host:port");
  }
  return config;
}

}  // namespace

std::shared_ptr<World> WorldFromEnvironment() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  const std::string rank = Variable({"ONNXPAR_RANK", "OMPI_COMM_WORLD_RANK"});
  if (rank.empty()) return nullptr;
  std::shared_ptr<World> world = World::Find("environment");
  return world ? world : World::Create(ConfigFromEnvironment(rank));
}

}  // namespace onnxpar
