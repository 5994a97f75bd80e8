// Hashes of the values that the members of a collective must agree on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace onnxpar {

/// Returns a hash of `seed` and `value` (the finalizer of splitmix64). Mix(Mix(0, a), b) is a hash
/// of the pair (a, b).
inline uint64_t Mix(uint64_t seed, uint64_t value) {
  uint64_t x = (seed ^ value) + 0x9e3779b97f4a7c15u + (seed << 6);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

inline uint64_t Mix(uint64_t seed, const std::string& text) {
  seed = Mix(seed, text.size());
  for (char c : text) seed = Mix(seed, static_cast<unsigned char>(c));
  return seed;
}

template <typename Integer>
uint64_t Mix(uint64_t seed, const std::vector<Integer>& values) {
  seed = Mix(seed, values.size());
  for (Integer value : values) seed = Mix(seed, static_cast<uint64_t>(value));
  return seed;
}

}  // namespace onnxpar
