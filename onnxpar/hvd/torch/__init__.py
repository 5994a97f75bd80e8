"""Horovod's API for loops of PyTorch, and a DistributedDataParallel, over onnxpar's transport
(`pip install 'onnxpar[torch]'`). Tensors are on the CPU.

    import onnxpar.hvd.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(dataset, batch_size=32, sampler=hvd.DistributedSampler(dataset))
    ...
    loss.backward()
    optimizer.step()  # by the averages over the ranks

or

    model = hvd.DistributedDataParallel(model)
    ...
    loss.backward()  # param.grad is the average
    optimizer.step()
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("onnxpar.hvd.torch needs PyTorch: pip install 'onnxpar[torch]'") from error

from onnxpar.hvd import (
    Adasum,
    Average,
    Compression,
    Handle,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    ReduceOp,
    Sum,
    add_process_set,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    remove_process_set,
    rocm_built,
    run_on_threads,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
)
from onnxpar.hvd.torch import elastic
from onnxpar.hvd.torch.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from onnxpar.hvd.torch.data_parallel import (
    DistributedDataParallel,
)
from onnxpar.hvd.torch.exchanges import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from onnxpar.hvd.torch.optimizer import (
    DistributedOptimizer,
)
from onnxpar.hvd.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from onnxpar.hvd.torch.sampler import (
    DistributedSampler,
)
from onnxpar.hvd.torch.sync_batch_norm import (
    SyncBatchNorm,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "DistributedSampler",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run_on_threads",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
