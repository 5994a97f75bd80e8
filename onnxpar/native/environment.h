// The world that environment variables describe.
#pragma once

#include <memory>

#include "world.h"

namespace onnxpar {

/// Returns the world that the variables ONNXPAR_RANK, ONNXPAR_WORLD_SIZE, ONNXPAR_STORE,
/// ONNXPAR_BIND and ONNXPAR_TIMEOUT (seconds) describe, or those of mpirun, srun or torchrun, read
/// as in onnxpar.runtime.launch.launch. Joins the world on the first call. Returns null if no
/// variable gives a rank.
std::shared_ptr<World> WorldFromEnvironment();

}  // namespace onnxpar
