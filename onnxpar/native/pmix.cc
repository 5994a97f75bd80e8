// The structures here are the same in PMIx 2 to 5. The library is loaded at run time, only if a
// launcher has set its variables, so the plugin does not depend on it.
#include "pmix.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace onnxpar {
namespace {

constexpr uint16_t kString = 3, kInt = 6;
constexpr uint8_t kGlobal = 3;
constexpr char kTimeout[] = "pmix.timeout";

struct Process {
  char job[256];
  uint32_t rank;
};

struct Value {
  uint16_t type;
  union {
    const char* string;
    int number;
    char bytes[24];
  } data;
};

struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};

}  // namespace

struct Pmix::Functions {
  int (*PMIx_Init)(Process*, Info*, size_t);
  int (*PMIx_Finalize)(const Info*, size_t);
  int (*PMIx_Put)(uint8_t, const char*, Value*);
  int (*PMIx_Commit)();
  int (*PMIx_Get)(const Process*, const char*, const Info*, size_t, Value**);
};

Pmix::Pmix() : functions_(std::make_unique<Functions>()) {
  void* const library = dlopen("libpmix.so.2", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    throw std::runtime_error(
        "ranks on several hosts find each other through mpirun by PMIx, but there is no "
        "libpmix.so.2: install it (on Debian and Ubuntu: apt install libpmix2), or set "
        "ONNXPAR_STORE=tcp://host:port and ONNXPAR_KEY");
  }
  const auto find = [library](const char* name, auto* function) {
    *reinterpret_cast<void**>(function) = dlsym(library, name);
    if (*function == nullptr) throw std::runtime_error(std::string("libpmix.so.2 has no ") + name);
  };
  find("PMIx_Init", &functions_->PMIx_Init);
  find("PMIx_Finalize", &functions_->PMIx_Finalize);
  find("PMIx_Put", &functions_->PMIx_Put);
  find("PMIx_Commit", &functions_->PMIx_Commit);
  find("PMIx_Get", &functions_->PMIx_Get);
  Process own{};
  if (const int error = functions_->PMIx_Init(&own, nullptr, 0)) {
    throw std::runtime_error("PMIx does not reach the launcher of this process (PMIx_Init: " +
                             std::to_string(error) + ")");
  }
  job_ = own.job;
}

Pmix::~Pmix() { functions_->PMIx_Finalize(nullptr, 0); }

void Pmix::Publish(const std::string& key, const std::string& value) {
  Value text{};
  text.type = kString;
  text.data.string = value.c_str();
  int error = functions_->PMIx_Put(kGlobal, key.c_str(), &text);
  if (error == 0) error = functions_->PMIx_Commit();
  if (error == 0) return;
  throw std::runtime_error("PMIx does not publish '" + key + "' (" + std::to_string(error) + ")");
}

std::optional<std::string> Pmix::Find(uint32_t rank, const std::string& key,
                                      std::chrono::seconds patience) const {
  Process other{};
  job_.copy(other.job, sizeof(other.job) - 1);
  other.rank = rank;
  Info timeout{};
  std::memcpy(timeout.key, kTimeout, sizeof(kTimeout));
  timeout.value.type = kInt;
  timeout.value.data.number = static_cast<int>(patience.count());
  Value* found = nullptr;
  const int error = functions_->PMIx_Get(&other, key.c_str(), &timeout, 1, &found);
  if (error != 0 || found == nullptr || found->type != kString) return std::nullopt;
  return std::string(found->data.string);
}

}  // namespace onnxpar
