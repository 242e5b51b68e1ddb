"""Kernels for layers computed as one, compiled for GPUs that need not be here: do they fit?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from polyfed.engines.stacked import pooled_kernels as kernels


def shared(kernel, tiles, pointers, numbers, constants):
    types = dict.fromkeys(pointers, "*fp32") | dict.fromkeys(numbers, "i32") | {"places": "*u8"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature,
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


for channels, out in ((16, 32), (32, 64)):
    layer = kernels.Layer(10, 12, 12, channels, out, (5, 5))
    common = dict(zip(("H", "W", "C", "OUT", "KH", "KW"), layer.numbers()), PRECISION="tf32", BO=layer.filters)
    tiles = kernels._for_results(layer)
    own = common | {"BIAS": True, "RELU": True, "BM": tiles.rows, "BK": tiles.depth}
    print(shared(kernels._convolve, tiles, ("x", "field", "bias", "y"), ("samples",), own))
    tiles = kernels._for_images(layer)
    own = common | {"SH": 3, "SW": 3, "BM": tiles.rows, "BN": kernels.power(4 * channels)}
    print(shared(kernels._image_gradient, tiles, ("g", "turned", "x"), ("samples",), own))
    tiles = kernels._for_weights(layer)
    own = common | {"BM": tiles.rows, "BK": tiles.depth}
    numbers = ("samples", "clients", "steps")
    print(shared(kernels._weight_gradient, tiles, ("x", "g", "parts"), numbers, own))
"""
SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on a GPU for gaming; those for servers allow more."""


def test_the_largest_layers_fit_into_shared_memory() -> None:
    """Not interpreted, as in other tests, so in another process. Tiles that are too large fail only when launched."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [int(line) for line in done.stdout.split()]
    assert len(found) == 6
    assert max(found) <= SHARED
