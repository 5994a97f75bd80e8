#include "key.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <system_error>

namespace onnxpar {

std::string RandomBytes(size_t count) {
  std::string bytes(count, '\0');
  if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) {
    throw std::system_error(errno, std::generic_category(), "cannot make a random key");
  }
  return bytes;
}

std::string RandomKey() {
  const std::string bytes = RandomBytes(16);
  std::string key;
  for (const unsigned char byte : bytes) {
    key += "0123456789abcdef"[byte >> 4];
    key += "0123456789abcdef"[byte & 15];
  }
  return key;
}

bool SameKey(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string KeyFromEnvironment() {
  const char* const value = std::getenv("ONNXPAR_KEY");
  const std::string key = value == nullptr ? "" : value;
  if (key.empty() || (key.size() >= kShortestKey && key.size() <= kLongestKey)) return key;
  throw std::runtime_error("ONNXPAR_KEY has " + std::to_string(key.size()) +
                           " characters, but a key has 16 to 512; make one with: openssl rand "
                           "-hex 16");
}

}  // namespace onnxpar
