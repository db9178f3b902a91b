"""A side of `stoker-bench trainer`: training steps in JAX with the models of src/models.rs.

    jax_steps.py MODEL THREADS

One compiled function computes loss, gradients and the step of SGD with momentum 0.9. Images have
their channels last. The protocol is that of torch_steps.py.
"""

import os
import sys

THREADS = int(sys.argv[2])
# XLA starts one thread for each processor on which the process may run.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])

import json
import time

import jax
import jax.numpy as jnp

VOCABULARY, SEQUENCE, WIDTH, HEADS = 65, 64, 128, 4

keys = iter(jax.random.split(jax.random.key(0), 64))


def uniform(shape, inputs):
    return jax.random.uniform(next(keys), shape, minval=-(inputs**-0.5), maxval=inputs**-0.5)


def dense(inputs, outputs):
    return uniform((inputs, outputs), inputs), uniform((outputs,), inputs)


def linear(layer, x):
    return x @ layer[0] + layer[1]


def norm(layer, x):
    mean = x.mean(-1, keepdims=True)
    centered = x - mean
    variance = (centered * centered).mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + 1e-5) * layer[0] + layer[1]


def classes(samples, num_classes):
    return jax.random.randint(next(keys), (samples,), 0, num_classes)


def mlp():
    layers = [dense(784, 512), dense(512, 256), dense(256, 10)]

    def forward(layers, x):
        x = jax.nn.relu(linear(layers[0], x))
        x = jax.nn.relu(linear(layers[1], x))
        return linear(layers[2], x)

    return layers, forward, jax.random.normal(next(keys), (128, 784)), classes(128, 10)


def cnn():
    def kernel(inputs, outputs):
        return uniform((3, 3, inputs, outputs), 9 * inputs), uniform((outputs,), 9 * inputs)

    layers = [kernel(1, 16), kernel(16, 32), dense(32 * 7 * 7, 128), dense(128, 10)]

    def convolve(layer, x):
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, layer[0], (1, 1), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + layer[1])
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")

    def forward(layers, x):
        x = convolve(layers[1], convolve(layers[0], x))
        x = jax.nn.relu(linear(layers[2], x.reshape(x.shape[0], -1)))
        return linear(layers[3], x)

    return layers, forward, jax.random.normal(next(keys), (64, 28, 28, 1)), classes(64, 10)


def gpt():
    def ones():
        return jnp.ones(WIDTH), jnp.zeros(WIDTH)

    def block():
        return (
            ones(), dense(WIDTH, 3 * WIDTH), dense(WIDTH, WIDTH),
            ones(), dense(WIDTH, 4 * WIDTH), dense(4 * WIDTH, WIDTH),
        )  # fmt: skip

    def embedding(num):
        return jax.random.normal(next(keys), (num, WIDTH))

    layers = [
        embedding(VOCABULARY), embedding(SEQUENCE), block(), block(),
        ones(), dense(WIDTH, VOCABULARY),
    ]  # fmt: skip

    def encode(block, x):
        norm_1, attention, projection, norm_2, inner, outer = block
        heads = linear(attention, norm(norm_1, x)).reshape(*x.shape[:2], 3, HEADS, -1)
        query, key, value = (heads[:, :, part] for part in range(3))
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(projection, attended.reshape(x.shape))
        hidden = jax.nn.gelu(linear(inner, norm(norm_2, x)), approximate=False)
        return x + linear(outer, hidden)

    def forward(layers, tokens):
        x = layers[0][tokens] + layers[1][: tokens.shape[1]]
        x = encode(layers[3], encode(layers[2], x))
        return linear(layers[5], norm(layers[4], x)).reshape(-1, VOCABULARY)

    tokens = classes(2 * 16 * SEQUENCE, VOCABULARY).reshape(2, 16, SEQUENCE)
    return layers, forward, tokens[0], tokens[1].reshape(-1)


def respond(response):
    print(json.dumps(response), flush=True)


def product():
    multiply = jax.jit(jnp.matmul)
    for line in sys.stdin:
        best = 0.0
        for n in map(int, line.split(",")):
            left = jax.random.normal(next(keys), (n, n))
            multiply(left, left).block_until_ready()
            for _ in range(20):
                begin = time.perf_counter_ns()
                multiply(left, left).block_until_ready()
                best = max(best, 2 * n**3 / (time.perf_counter_ns() - begin))
        respond({"gflops": best})


def train(layers, forward, inputs, labels):
    def loss_of(layers, inputs, labels):
        log_probabilities = jax.nn.log_softmax(forward(layers, inputs))
        return -jnp.take_along_axis(log_probabilities, labels[:, None], 1).mean()

    def step(layers, velocities, inputs, labels):
        loss, gradients = jax.value_and_grad(loss_of)(layers, inputs, labels)
        velocities = jax.tree.map(lambda v, g: 0.9 * v + g, velocities, gradients)
        return jax.tree.map(lambda p, v: p - 0.01 * v, layers, velocities), velocities, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    velocities = jax.tree.map(jnp.zeros_like, layers)
    respond({"parameters": sum(leaf.size for leaf in jax.tree.leaves(layers))})
    for line in sys.stdin:
        nanoseconds, losses = [], []
        last = time.perf_counter_ns()
        for _ in range(int(line)):
            layers, velocities, loss = step(layers, velocities, inputs, labels)
            losses.append(float(loss))
            now = time.perf_counter_ns()
            nanoseconds.append(now - last)
            last = now
        respond({"nanoseconds": nanoseconds, "losses": [losses[0], losses[-1]]})


if sys.argv[1] == "product":
    product()
else:
    train(*{"mlp": mlp, "cnn": cnn, "gpt": gpt}[sys.argv[1]]())
