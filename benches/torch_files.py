"""A side of `stoker-bench checkpoint`: parameters by safetensors and by torch.save.

    torch_files.py FOLDER LAYERS

The model has LAYERS layers of 64 MiB.

Serves the commands `save FORMAT`, `save-sync FORMAT` and `restore FORMAT` from stdin and responds
with seconds. FORMAT is safetensors or torch. A restore loads the weights into the model, as ours
does, and checks them.
"""

import json
import os
import sys
import time

import torch
from safetensors.torch import load_file, save_file
from torch import nn

WIDTH = 4096


def layers():
    num = int(sys.argv[2])
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num)))


def sync(path):
    """Syncs a file and its directory entry to disk, as Stoker's storage does."""
    for name in (path, os.path.dirname(path)):
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def save(file_format, path, model):
    if file_format == "safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)


def restore(file_format, path, model):
    if file_format == "safetensors":
        model.load_state_dict(load_file(path))
    else:
        model.load_state_dict(torch.load(path, weights_only=True))


def main():
    torch.manual_seed(0)
    trained, fresh = layers(), layers()
    for line in sys.stdin:
        command, file_format = line.split()
        path = os.path.join(sys.argv[1], f"weights.{file_format}")
        if command == "restore":
            for layer in fresh:
                nn.init.zeros_(layer.weight)
        elif os.path.exists(path):
            os.remove(path)
        os.sync()
        start = time.perf_counter()
        if command == "restore":
            restore(file_format, path, fresh)
        else:
            save(file_format, path, trained)
        if command == "save-sync":
            sync(path)
        seconds = time.perf_counter() - start
        if command == "restore":
            pairs = zip(trained, fresh)
            assert all(torch.equal(a.weight, b.weight) for a, b in pairs), "weights differ"
        print(json.dumps({"seconds": seconds, "blocked": None}), flush=True)


main()
