// The world that the environment of this process describes.
#pragma once

#include <memory>

#include "world.h"

namespace onnxpar {

/// Joins, on first use, the world of ONNXPAR_RANK, ONNXPAR_WORLD_SIZE, ONNXPAR_STORE, ONNXPAR_BIND
/// and ONNXPAR_TIMEOUT (seconds), or of the variables of mpirun, srun or torchrun, as
/// onnxpar.runtime.launch does; null if these describe none.
std::shared_ptr<World> WorldFromEnvironment();

}  // namespace onnxpar
