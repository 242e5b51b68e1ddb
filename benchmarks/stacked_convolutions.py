"""How long a convolution of stacked clients takes in each way, forwards and backwards, for the shapes of ResNets.

`polyfed.engines.stacked.convolutions.way` chooses between them; this shows where its limits should be.

    python benchmarks/stacked_convolutions.py --device cuda --clients 20 --batch 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from polyfed.engines.stacked import layers
from polyfed.engines.stacked.convolutions import Direct, Products, Way, Windows

SHAPES = [
    # in, out, side, filter, stride
    (3, 64, 32, 7, 2), (64, 64, 8, 3, 1), (64, 128, 8, 3, 2), (128, 128, 4, 3, 1), (256, 256, 2, 3, 1),
    (512, 512, 1, 3, 1), (64, 256, 8, 1, 1), (256, 64, 8, 1, 1), (1024, 256, 2, 1, 1), (16, 32, 14, 5, 1),
]  # fmt: skip


def ours_in(how: Way, x: Tensor, weight: Tensor) -> Tensor:
    """A convolution in one of our ways."""
    y: Tensor = layers.Convolution.apply(x, weight, None, how)
    return y


def step(convolve: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> None:
    """The gradients of images and weights of all clients."""
    vmap(grad(lambda w, a: convolve(a, w).square().sum(), (0, 1)))(weight, x)


def milliseconds(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """For one call, after three that do not count."""
    times = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return median(times[3:])


def main() -> None:
    """Print a row for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    ours = device.type == "cuda" and layers.kernels() is not None
    print(f"{given.clients} clients, batch {given.batch}, milliseconds forwards and backwards")
    print(f"{'in, out, side, filter, stride':30}{'grouped':>10}{'products':>10}{'direct':>10}")
    for channels, out, side, size, stride in SHAPES:
        x = torch.randn(given.clients, given.batch, channels, side, side, device=device)
        weight = torch.randn(given.clients, out, channels, size, size, device=device)
        windows = Windows((size, size), (stride, stride), (size // 2, size // 2), (1, 1))
        ways: list[Callable[[Tensor, Tensor], Tensor]] = [
            partial(functional.conv2d, stride=stride, padding=size // 2)  # what `vmap` makes of it
        ]
        if ours:
            ways.append(partial(ours_in, Products(windows, biased=False)))
        if ours and stride == 1 and out <= 64:
            ways.append(partial(ours_in, Direct(windows)))
        times = [milliseconds(partial(step, each, x, weight), device, given.repeats) for each in ways]
        print(f"{channels, out, side, size, stride!s:30}" + "".join(f"{each:10.2f}" for each in times))


if __name__ == "__main__":
    main()
