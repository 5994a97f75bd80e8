"""A Horovod-style API for your own training loops, with NumPy and onnxruntime.

Start the script with `mpirun -n 4 python train.py`: each process is a rank, and all make the same
calls:

    hvd.init()
    hvd.broadcast_parameters(params, root_rank=0)
    optimizer = hvd.DistributedOptimizer(hvd.SGD(lr=0.1))
    ...
    optimizer.step(params, grads)
"""

from onnxpar.hvd.arrays import (
    allgather,
    allreduce,
    allreduce_async,
    alltoall,
    barrier,
    broadcast,
    grouped_allreduce,
    poll,
    reducescatter,
    synchronize,
)
from onnxpar.hvd.communicator import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    run_on_threads,
    shutdown,
    size,
)
from onnxpar.hvd.compression import Compression
from onnxpar.hvd.distributed import DistributedOptimizer, scale_learning_rate
from onnxpar.hvd.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from onnxpar.hvd.optimizers import SGD, Adam, AdamW, Optimizer
from onnxpar.hvd.reductions import Average, Max, Min, Product, ReduceOp, Sum
from onnxpar.hvd.sampler import DistributedSampler

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedSampler",
    "Max",
    "Min",
    "Optimizer",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "run_on_threads",
    "scale_learning_rate",
    "shutdown",
    "size",
    "synchronize",
]
