// Collectives in two ops: StartX hands the collective X to a thread of the plugin, and Complete
// waits for its result. The nodes that onnxruntime runs between these two hide the communication.
#pragma once

#include <memory>

#include "collective.h"
#include "kernels.h"
#include "world.h"

namespace onnxpar {

/// Returns the kernel that starts a collective. Its outputs are an empty tensor of shape [0,
/// number, dimensions of the result], whose number names the started collective for Complete, and a
/// token.
///
/// The plugin's thread works on copies of all operands and of the result. So if the session ends,
/// or a run fails, before the collective has ended, onnxruntime can free its tensors. If
/// `in_place`, the result is written over the copy of operand 0.
std::unique_ptr<Kernel> MakeStart(std::unique_ptr<Collective> collective, bool in_place,
                                  std::shared_ptr<World> world);

/// Returns the kernel that waits for a started collective, and returns its result. Its token has
/// the shape [0, A, B, ...]: the plugin's thread began the collective A microseconds before the end
/// of this kernel, and ended it B microseconds before. The numbers after the 0 of the collective's
/// own token follow.
std::unique_ptr<Kernel> MakeComplete();

/// Returns the kernel of After, which outputs a token once its operand has been computed.
std::unique_ptr<Kernel> MakeAfter();

}  // namespace onnxpar
