// The secret that the ranks of a world share.
#pragma once

#include <string>

namespace onnxpar {

/// Shorter ones can be guessed.
constexpr size_t kShortestKey = 16;
constexpr size_t kLongestKey = 512;

/// 128 random bits, as text.
std::string RandomKey();

/// True if two keys are equal; takes the same time wherever they differ.
bool SameKey(const std::string& a, const std::string& b);

/// ONNXPAR_KEY; empty if it is not set. Throws if it is too short or too long.
std::string KeyFromEnvironment();

}  // namespace onnxpar
