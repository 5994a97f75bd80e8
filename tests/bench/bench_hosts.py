"""All-reduces between two hosts over a link, against what the link needs for their bytes.

    python tests/bench/bench_hosts.py [--ranks 4] [--bytes 64000000] [--rate 125000000]
        [--latency 0.0001] [--rounds 5] [--connections 1 2 4]

The hosts are network namespaces, and the link is a process (tests/hosts/link.py), which shares the
cores of this machine with the ranks. In turns, the ranks of a host make sums together and send
these over the link (by host), or each rank exchanges parts with all others (flat). Prints the
seconds of the slowest rank, the bytes that a host sends, the ratio to the link's time for the bytes
of one tensor each way, and the CPU seconds of all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from hosts.hosts import Hosts, why_not
from hosts.link import Network, Quality
from hosts.ranks import finish, start

FLAT = {"ONNXPAR_LINK": "latency=1us"}
"""Each rank is a host of its own, in a simulation that adds almost nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="on each host")
    parser.add_argument("--bytes", type=int, nargs="+", default=[64_000_000])
    parser.add_argument("--rate", type=float, default=125e6, help="of the link, bytes per second")
    parser.add_argument("--latency", type=float, default=100e-6, help="of the link, seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="all-reduces in each round")
    parser.add_argument("--connections", type=int, nargs="+", default=[1])
    parser.add_argument("--no-flat", action="store_true")
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    kinds = {"by host": {}} if args.no_flat else {"by host": {}, "flat": FLAT}
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    for size in args.bytes:
        least = size / args.rate + args.latency if args.rate else float("nan")
        print(f"{size} bytes: the link needs {1e3 * least:.1f} ms")
        ratios: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for name, settings in kinds.items():
                for count in args.connections:
                    settings = {**settings, "ONNXPAR_CONNECTIONS": str(count)}
                    found = measure(args, size, settings)
                    label = f"{name}, {count} connections"
                    ratios.setdefault(label, []).append(found["seconds"] / least)
                    print(
                        f"  {label:24} {1e3 * found['seconds']:8.1f} ms  "
                        f"{found['moved'] / 1e6:7.1f} MB  {found['seconds'] / least:5.2f}  "
                        f"CPU of ranks {found['cpu']:.2f} s, load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
        for label, each in ratios.items():
            print(f"  {label:24} median {statistics.median(each):.2f}, least {min(each):.2f}")


def measure(args: argparse.Namespace, size: int, settings: dict[str, str]) -> dict[str, float]:
    """Seconds of one all-reduce, the bytes that the first host sends in it, and CPU seconds."""
    quality = Quality(rate=args.rate, latency=args.latency)
    with Hosts(2) as hosts, Network(hosts, quality) as network:
        arguments = [str(size // 4), str(args.repeats)]
        ranks = start(
            "bench.bench_hosts", hosts, [args.ranks] * 2, network.addresses, arguments, settings
        )
        said = [json.loads(text) for text in finish(ranks)]
        moved = network.moved()[0] / (args.repeats + 1)
    each = [max(rank["seconds"][i] for rank in said) for i in range(args.repeats)]
    cpu = sum(rank["cpu"] for rank in said) / args.repeats
    return {"seconds": statistics.median(each), "moved": moved, "cpu": cpu}


def serve(rank: int, size: int, store: str, address: str, elements: int, repeats: int) -> None:
    """One rank: prints the seconds of each all-reduce after the first."""
    import numpy as np
    from native.ranks import TOKEN, collective, session
    from onnx import TensorProto

    from onnxpar.runtime.ranks.groups import World

    with World.create("bench", rank, size, store, address) as world:
        opened = session(world, collective("AllReduce", TensorProto.FLOAT, ["n"]))
        barrier = session(world, collective("AllReduce", TensorProto.FLOAT, ["n"], tag=2))
        x = np.full([elements], rank, "f4")
        seconds, used = [], 0.0
        for i in range(repeats + 1):
            barrier.run(["Y"], {"X": x[:1], "t": TOKEN})
            before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            [y] = opened.run(["Y"], {"X": x, "t": TOKEN})
            ended, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            assert y[0] == y[-1] == size * (size - 1) // 2
            if i:
                seconds.append(ended - begun)
                used += after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        print(json.dumps({"seconds": seconds, "cpu": used}))


if __name__ == "__main__":
    if len(sys.argv) == 7 and sys.argv[1].isdigit():
        rank, size, store, address, elements, repeats = sys.argv[1:]
        serve(int(rank), int(size), store, address, int(elements), int(repeats))
    else:
        main()
