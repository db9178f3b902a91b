"""A side of `stoker-bench trainer`: training steps in PyTorch with the models of src/models.rs.

    torch_steps.py MODEL THREADS [VARIANT]

The variant is eager (the default), compile or channels-last. The model `product` measures matrix
products instead: each line of stdin has their sizes, and the response the largest rate.
If torchrun's variables are set, the process is one of several ranks that use DDP over gloo.
The program reads a number of steps from each line of stdin, trains them on one fixed batch, and
responds with their times and losses.
"""

import itertools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, SEQUENCE, WIDTH, HEADS = 65, 64, 128, 4


def mlp():
    model = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return model, torch.randn(128, 784), torch.randint(10, (128,))


def cnn():
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, torch.randn(64, 1, 28, 28), torch.randint(10, (64,))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        samples, length, _ = x.shape
        parts = self.attention(self.norm_1(x)).split(WIDTH, dim=2)
        query, key, value = (
            part.view(samples, length, HEADS, -1).transpose(1, 2) for part in parts
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        return x + self.outer(F.gelu(self.inner(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.output(self.norm(self.layers(x))).flatten(0, 1)


def gpt():
    tokens = torch.randint(VOCABULARY, (2, 16, SEQUENCE))
    return Gpt(), tokens[0], tokens[1].flatten()


def product():
    for line in sys.stdin:
        best = 0.0
        for n in map(int, line.split(",")):
            left, out = torch.randn(n, n), torch.empty(n, n)
            torch.mm(left, left, out=out)
            for _ in range(20):
                begin = time.perf_counter_ns()
                torch.mm(left, left, out=out)
                best = max(best, 2 * n**3 / (time.perf_counter_ns() - begin))
        print(json.dumps({"gflops": best}), flush=True)


def main():
    torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    if sys.argv[1] == "product":
        return product()
    variant = (sys.argv[3:] or ["eager"])[0]
    model, inputs, labels = {"mlp": mlp, "cnn": cnn, "gpt": gpt}[sys.argv[1]]()
    follows = False
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
        follows = dist.get_rank() > 0
        model = nn.parallel.DistributedDataParallel(model)
    if variant == "channels-last":
        model = model.to(memory_format=torch.channels_last)
        inputs = inputs.to(memory_format=torch.channels_last)

    def loss_of(inputs, labels):
        return F.cross_entropy(model(inputs), labels)

    if variant == "compile":
        loss_of = torch.compile(loss_of)
    # `fused` is PyTorch's fastest SGD on a CPU.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"parameters": parameters}), flush=True)
    # Other ranks train one step after the other; DDP keeps them in step with rank 0.
    for line in itertools.repeat("1") if follows else sys.stdin:
        nanoseconds, losses = [], []
        last = time.perf_counter_ns()
        for _ in range(int(line)):
            loss = loss_of(inputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            now = time.perf_counter_ns()
            nanoseconds.append(now - last)
            last = now
        response = {"nanoseconds": nanoseconds, "losses": [losses[0], losses[-1]]}
        print(json.dumps(response), flush=True)


main()
