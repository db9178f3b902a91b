"""A rank of `stoker-bench collective`: all-reduce of flat tensors by PyTorch's gloo.

Started once for each rank with the variables of torchrun. Rank 0 reads `BYTES TIMES` from each
line of stdin and responds with the times of its all-reduces.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = int(os.environ["RANK"]) == 0
    while True:
        command = [sys.stdin.readline().split() if is_first else None]
        dist.broadcast_object_list(command)
        if not command[0]:
            return
        num_bytes, times = map(int, command[0])
        values = torch.ones(num_bytes // 4)
        nanoseconds = []
        for _ in range(times):
            dist.barrier()
            begin = time.perf_counter_ns()
            dist.all_reduce(values)
            nanoseconds.append(time.perf_counter_ns() - begin)
        if is_first:
            print(json.dumps({"nanoseconds": nanoseconds}), flush=True)


main()
