// Collectives in two ops: StartX hands a collective to a thread of the plugin, and Complete waits
// for its result. What onnxruntime runs in between hides the communication.
#pragma once

#include <memory>

#include "collective.h"
#include "kernels.h"
#include "world.h"

namespace onnxpar {

/// Returns the kernel that starts a collective. Its outputs are an empty tensor of shape
/// [0, number, shape of the result], which names the started collective, and the token.
///
/// The thread works on copies of all operands and the result. So a session may end, or a run may
/// fail, before the collective has ended: onnxruntime then frees memory that nobody uses any more.
std::unique_ptr<Kernel> MakeStart(std::unique_ptr<Collective> collective, bool in_place,
                                  std::shared_ptr<World> world);

/// Returns the kernel that waits for a started collective, and returns the collective's result. Its
/// token has the shape [0, A, B, ...]: the thread began the collective A microseconds before the
/// end of this kernel, and ended it B microseconds before. The numbers after these are those of the
/// collective's own token after its 0.
std::unique_ptr<Kernel> MakeComplete();

/// Returns the kernel that passes a token on once its operand has been computed.
std::unique_ptr<Kernel> MakeAfter();

}  // namespace onnxpar
