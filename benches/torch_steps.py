"""A side of `stoker-bench trainer`: training steps in PyTorch with the models of src/models.rs.

    torch_steps.py MODEL THREADS [VARIANT [DEVICE [PRECISION]]]

The variant is eager (the default), compile or channels-last, the device cpu (the default) or cuda,
the precision f32 (the default), tf32 or bf16. The model `product` measures matrix products instead:
each line of stdin has their sizes, and the response the largest rate.
If torchrun's variables are set, the process is one of several ranks that use DDP over gloo.
The program reads a number of steps from each line of stdin, trains them on one fixed batch, and
responds with their times and losses.
"""

import itertools
import json
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY = 65
# Width, heads, layers, sequence and batch.
GPT_SIZES = {"gpt": (128, 4, 2, 64, 16), "gpt768": (768, 12, 12, 256, 16)}


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
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        samples, length, width = x.shape
        parts = self.attention(self.norm_1(x)).split(width, dim=2)
        query, key, value = (
            part.view(samples, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.outer(F.gelu(self.inner(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self, width, heads, layers, sequence):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(sequence, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.output(self.norm(self.layers(x))).flatten(0, 1)


def gpt(name):
    width, heads, layers, sequence, batch = GPT_SIZES[name]
    tokens = torch.randint(VOCABULARY, (2, batch, sequence))
    return Gpt(width, heads, layers, sequence), tokens[0], tokens[1].flatten()


def product(device, dtype):
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for line in sys.stdin:
        best = 0.0
        for n in map(int, line.split(",")):
            left = torch.randn(n, n, device=device, dtype=dtype)
            out = torch.empty_like(left)
            torch.mm(left, left, out=out)
            for _ in range(20):
                wait()
                begin = time.perf_counter_ns()
                torch.mm(left, left, out=out)
                wait()
                best = max(best, 2 * n**3 / (time.perf_counter_ns() - begin))
        print(json.dumps({"gflops": best}), flush=True)


def main():
    torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    defaults = ["eager", "cpu", "f32"]
    variant, device, precision = sys.argv[3:] + defaults[len(sys.argv[3:]) :]
    # By default, PyTorch uses TF32 for convolutions but not for matrix products.
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if sys.argv[1] == "product":
        return product(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    model, inputs, labels = {"mlp": mlp, "cnn": cnn}.get(sys.argv[1], lambda: gpt(sys.argv[1]))()
    model, inputs, labels = model.to(device), inputs.to(device), labels.to(device)
    follows = False
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
        follows = dist.get_rank() > 0
        model = nn.parallel.DistributedDataParallel(model)
    if variant == "channels-last":
        model = model.to(memory_format=torch.channels_last)
        inputs = inputs.to(memory_format=torch.channels_last)

    def loss_of(inputs, labels):
        with torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext():
            return F.cross_entropy(model(inputs), labels)

    if variant == "compile":
        loss_of = torch.compile(loss_of)
    # `fused` is PyTorch's fastest SGD.
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
