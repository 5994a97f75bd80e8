// The key of a world: a secret that its ranks share.
#pragma once

#include <string>

namespace onnxpar {

/// The fewest characters of a key; shorter keys could be guessed.
constexpr size_t kShortestKey = 16;
constexpr size_t kLongestKey = 512;

/// Returns random bytes from the kernel. Throws std::system_error.
std::string RandomBytes(size_t count);

/// Returns 128 random bits, as text.
std::string RandomKey();

/// True if two keys are equal. Takes the same time wherever they differ, so that time tells nothing
/// about the key.
bool SameKey(const std::string& a, const std::string& b);

/// Returns the value of ONNXPAR_KEY; empty if it is not set. Throws if it is too short or too long.
std::string KeyFromEnvironment();

}  // namespace onnxpar
