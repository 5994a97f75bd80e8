"""A Horovod-style API for your own training loops, with NumPy and onnxruntime.

Start the script with `mpirun -n 4 python train.py`: each process is a rank, and all make the same
calls:

    hvd.init()
    hvd.broadcast_parameters(params, root_rank=0)
    optimizer = hvd.DistributedOptimizer(hvd.SGD(lr=0.1))
    ...
    optimizer.step(params, grads)
"""

from onnxpar.base.errors import RankError as HorovodInternalError
from onnxpar.hvd import callbacks, elastic, kv
from onnxpar.hvd.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from onnxpar.hvd.arrays import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
)
from onnxpar.hvd.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from onnxpar.hvd.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from onnxpar.hvd.communicator import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    run_on_threads,
    shutdown,
    size,
)
from onnxpar.hvd.compression import (
    Compression,
)
from onnxpar.hvd.distributed import (
    DistributedOptimizer,
    scale_learning_rate,
)
from onnxpar.hvd.handles import (
    Handle,
    poll,
    synchronize,
)
from onnxpar.hvd.initialization import (
    init,
    start_timeline,
    stop_timeline,
)
from onnxpar.hvd.optimizers import (
    SGD,
    Adam,
    AdamW,
    Optimizer,
)
from onnxpar.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from onnxpar.hvd.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
)
from onnxpar.hvd.sampler import (
    DistributedSampler,
)
from onnxpar.hvd.sparse import (
    IndexedSlices,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedSampler",
    "Handle",
    "HorovodInternalError",
    "IndexedSlices",
    "Max",
    "Min",
    "Optimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
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
    "callbacks",
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
    "kv",
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
    "scale_learning_rate",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
