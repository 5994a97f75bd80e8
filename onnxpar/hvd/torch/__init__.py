"""Data parallelism for loops of PyTorch (`pip install 'onnxpar[torch]'`): onnxpar's transport
averages gradients over the ranks during the backward pass.

    hvd.init()
    model = DistributedDataParallel(module)
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    ...
    loss.backward()  # param.grad is the average
    optimizer.step()

Tensors are on the CPU.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("onnxpar.hvd.torch needs PyTorch: pip install 'onnxpar[torch]'") from error

from onnxpar.hvd.torch.data_parallel import DistributedDataParallel
from onnxpar.hvd.torch.sampler import DistributedSampler

__all__ = ["DistributedDataParallel", "DistributedSampler"]
