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


def zeros():
    """Returns the layers without random weights. All of their memory is in place."""
    num = int(sys.argv[2])
    all_layers = [nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(num)]
    for layer in all_layers:
        nn.init.zeros_(layer.weight)
    return nn.Sequential(*all_layers)


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


def measure(command, file_format, trained):
    """Returns the seconds of one command."""
    path = os.path.join(sys.argv[1], f"weights.{file_format}")
    if command == "restore":
        # Freed after the command, so that large models fit beside the other side.
        fresh = zeros()
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
    return seconds


def main():
    torch.manual_seed(0)
    trained = layers()
    for line in sys.stdin:
        command, file_format = line.split()
        seconds = measure(command, file_format, trained)
        print(json.dumps({"seconds": seconds, "blocked": None}), flush=True)


main()
