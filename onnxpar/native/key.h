// The secret that the ranks of a world share, and strangers lack.
#pragma once

#include <string>

namespace onnxpar {

/// Shorter ones can be guessed.
constexpr size_t kShortestKey = 16;
constexpr size_t kLongestKey = 512;

/// 128 random bits, as text.
std::string RandomKey();

/// Whether two keys are equal; how long it takes tells nothing of where they differ.
bool SameKey(const std::string& a, const std::string& b);

/// ONNXPAR_KEY; empty where it is not set. Throws where it is too short or too long.
std::string KeyFromEnvironment();

}  // namespace onnxpar
