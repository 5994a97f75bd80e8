// The world that environment variables describe.
#pragma once

#include <memory>

#include "world.h"

namespace onnxpar {

/// Returns the world that ONNXPAR_RANK, ONNXPAR_WORLD_SIZE, ONNXPAR_STORE, ONNXPAR_BIND and
/// ONNXPAR_TIMEOUT (seconds) describe, or the variables of mpirun, srun or torchrun, read as in
/// onnxpar.runtime.launch.launch; null if they describe none. Joins it on first use.
std::shared_ptr<World> WorldFromEnvironment();

}  // namespace onnxpar
