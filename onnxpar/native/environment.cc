#include "environment.h"

#include <cmath>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace onnxpar {
namespace {

/// Returns the value of the first of the environment variables `names` that is set and not empty,
/// or "".
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

/// The names of the environment variables by which one launcher tells a process its rank and the
/// number of ranks.
struct Launcher {
  const char* rank;
  const char* size;
  const char* other_size;  // used if `size` is not set, but `step` is
  const char* step;
  bool optional;       // true if the rank counts only together with a size
  const char* lonely;  // a size to ignore: a shell under srun is a step of one task
};

const Launcher kLaunchers[] = {
    {"ONNXPAR_RANK", "ONNXPAR_WORLD_SIZE", "", "", false, ""},  // set by hand; these win
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "", "", false, ""},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_ID", true, "1"},
    {"RANK", "WORLD_SIZE", "", "", true, ""},
};

/// The rank and the size that one launcher's variables give, as text.
struct Place {
  const Launcher* launcher;
  std::string rank, size;

  std::string Text() const {
    return std::string(launcher->rank) + "=" + rank + ", " + launcher->size + "=" + size;
  }
};

/// Returns the rank and size from each launcher whose variables are set, in the order of
/// kLaunchers, so first those that a user set by hand.
std::vector<Place> Places() {
  std::vector<Place> places;
  for (const Launcher& launcher : kLaunchers) {
    Place place{&launcher, Variable({launcher.rank}), Variable({launcher.size})};
    const bool in_step = *launcher.step != '\0' && !Variable({launcher.step}).empty();
    if (place.size.empty() && in_step) place.size = Variable({launcher.other_size});
    const bool alone = place.size == launcher.lonely;
    if (place.rank.empty() || (launcher.optional && (place.size.empty() || alone))) continue;
    places.push_back(place);
  }
  return places;
}

/// Returns the first of these places, with the size of a later one if it has none. Throws if two
/// launchers give different ranks or sizes, unless the first place was set by hand.
Place Agreed(const std::vector<Place>& places) {
  Place agreed = places.front();
  for (const Place& other : places) {
    const bool same = other.rank == agreed.rank && other.size == agreed.size;
    if (agreed.launcher != kLaunchers && !same) {
      throw std::runtime_error(
          agreed.Text() + " and " + other.Text() + " contradict each other; unset those of the " +
          "launcher that did not start this process, or set ONNXPAR_RANK and " +
          "ONNXPAR_WORLD_SIZE, which override all others");
    }
    if (agreed.size.empty()) agreed.size = other.size;
  }
  return agreed;
}

/// True if a launcher's variables say that some of the `size` ranks are on other hosts.
bool HasOtherHosts(const std::string& size) {
  for (const char* name :
       {"ONNXPAR_LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"}) {
    const std::string local = Variable({name});
    if (!local.empty()) return local != size;
  }
  const std::string nodes = Variable({"SLURM_STEP_NUM_NODES"});
  return !nodes.empty() && nodes != "1";
}

/// Returns the store where the ranks meet, chosen as in onnxpar.runtime.launch.launch; empty if no
/// variable names one.
std::string StoreFromEnvironment(const std::string& size) {
  const std::string store = Variable({"ONNXPAR_STORE"});
  if (!store.empty()) return store;
  const bool by_mpirun = !Variable({"OMPI_COMM_WORLD_RANK"}).empty();
  // mpirun gives its processes on one host a common directory.
  const std::string directory = Variable({"PMIX_SERVER_TMPDIR"});
  if (!directory.empty() && by_mpirun && !HasOtherHosts(size)) {
    return "file:" + directory + "/onnxpar";
  }
  if (!Variable({"PMIX_NAMESPACE"}).empty() && by_mpirun) return "pmix:";
  const std::string master = Variable({"MASTER_ADDR"}), port = Variable({"MASTER_PORT"});
  if (!master.empty() && !port.empty()) {
    if (Variable({"LOCAL_WORLD_SIZE"}) == size) return "job:torchrun-" + port;
    const long next =
        std::lround(Number("MASTER_PORT", port)) + 1;  // torch's store uses the port itself
    return "tcp://" + master + ":" + std::to_string(next) + "#" + port;
  }
  const std::string job = Variable({"SLURM_JOB_ID", "SLURM_JOBID"});
  if (Variable({"SLURM_PROCID"}).empty() || job.empty() || HasOtherHosts(size)) return "";
  const std::string step = Variable({"SLURM_STEP_ID"});
  return "job:slurm-" + job + "." + (step.empty() ? "0" : step);
}

WorldConfig ConfigFromEnvironment(const Place& place) {
  const std::string timeout = Variable({"ONNXPAR_TIMEOUT"});
  const std::string bind = Variable({"ONNXPAR_BIND"});
  WorldConfig config;
  config.id = "environment";
  config.rank = static_cast<int>(Number(place.launcher->rank, place.rank));
  config.size = static_cast<int>(Number(place.launcher->size, place.size));
  config.store = StoreFromEnvironment(place.size);
  const bool finds_route = config.store.rfind("tcp:", 0) == 0 || HasOtherHosts(place.size);
  config.bind_address = bind.empty() && !finds_route ? "127.0.0.1" : bind;
  if (!timeout.empty()) {
    config.timeout =
        std::chrono::milliseconds(std::lround(1000 * Number("ONNXPAR_TIMEOUT", timeout)));
  }
  if (config.store.empty() && config.size > 1) {
    throw std::runtime_error(
        "ONNXPAR_STORE is not set; use file:/dir, or tcp://host:port and ONNXPAR_KEY");
  }
  return config;
}

}  // namespace

std::shared_ptr<World> WorldFromEnvironment() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  const std::vector<Place> places = Places();
  if (places.empty()) return nullptr;
  std::shared_ptr<World> world = World::Find("environment");
  return world ? world : World::Create(ConfigFromEnvironment(Agreed(places)));
}

}  // namespace onnxpar
