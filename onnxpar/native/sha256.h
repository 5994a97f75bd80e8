// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), so that ranks can prove a secret without OpenSSL.
#pragma once

#include <string>

namespace onnxpar {

/// Returns the 32 bytes of the SHA-256 digest of `bytes`.
std::string Sha256(const std::string& bytes);

/// Returns the 32 bytes of the MAC (HMAC with SHA-256) of `message` under `key`.
std::string HmacSha256(const std::string& key, const std::string& message);

}  // namespace onnxpar
