"""Our kernels against PyTorch's layers; without a GPU they are interpreted (see conftest.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from polyfed import compute
from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.stacked import convolutions, layers
from tests import support

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    pytest.skip("this Triton's interpreter does not know loops of computed length", allow_module_level=True)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, SAMPLES = 3, 2


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def gradients(layer: Callable[..., Tensor], dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Results and the gradients of all inputs, of a function that weighs results unevenly."""

    def loss(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(*arguments)
        return y.sin().sum(), y

    numbers = tuple(range(len(inputs)))
    found, results = vmap(grad(loss, numbers, has_aux=True), dims)(*inputs)
    return (results, *found)


def close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "out", "kernel", "padding", "side"),
    [
        (3, 16, (5, 5), 0, 12),
        (1, 6, (3, 3), 1, 7),
        (17, 20, (3, 2), (0, 1), 6),
        (2, 40, (1, 1), 0, 4),
        (3, 32, (3, 3), 0, 6),
        (32, 5, (3, 2), 1, 5),
        (3, 8, (3, 5), "same", 6),
        (2, 3, (3, 3), "valid", 4),
    ],
)
def test_convolution(channels: int, out: int, kernel: tuple[int, int], padding: Any, side: int) -> None:
    """With all pixels of the result in whole groups or not, and few channels or more."""
    x, weight = random(CLIENTS, SAMPLES, channels, side, side), random(CLIENTS, out, channels, *kernel)
    own = gradients(
        lambda *a: served(layers.convolution(*a, padding=padding)), (0, 0, 0), x, weight, random(CLIENTS, out)
    )
    theirs = gradients(lambda *a: functional.conv2d(*a, padding=padding), (0, 0, 0), x, weight, random(CLIENTS, out))
    close(own, theirs)


def test_blocks_are_larger_where_there_is_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(CLIENTS, SAMPLES, 3, 7, 7), random(CLIENTS, 5, 3, 2, 3)
    kernels = layers.kernels()
    smaller = kernels.convolve(x, weight, None, (0, 1))
    monkeypatch.setattr(kernels, "PROGRAMS", 0)
    torch.testing.assert_close(kernels.convolve(x, weight, None, (0, 1)), smaller)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter does not know bfloat16")
def test_bfloat16() -> None:
    """Products of bfloat16 numbers are added up in 32 bits."""
    x, weight = random(CLIENTS, SAMPLES, 3, 8, 8).bfloat16(), random(CLIENTS, 4, 3, 3, 3).bfloat16()
    own = gradients(lambda *a: served(layers.pooling(served(layers.convolution(*a)), 2)), (0, 0), x, weight)
    theirs = gradients(lambda *a: functional.max_pool2d(functional.conv2d(*a), 2), (0, 0), x.float(), weight.float())
    for mine, other in zip(own, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - other).norm() < 0.03 * other.norm()


def test_convolution_without_bias_of_images_that_lie_otherwise_and_of_shared_ones() -> None:
    weight, x = random(CLIENTS, 5, 4, 3, 3), random(SAMPLES, CLIENTS, 4, 8, 6).transpose(3, 4)
    for dims, images in (((1, 0), x), ((None, 0), x[:, 0])):
        own = gradients(lambda *a: served(layers.convolution(*a)), dims, images, weight)
        close(own, gradients(functional.conv2d, dims, images, weight))


def test_convolution_of_one_client_without_vmap() -> None:
    x, weight = random(SAMPLES, 3, 8, 8).requires_grad_(), random(4, 3, 3, 3).requires_grad_()
    own = torch.autograd.grad(served(layers.convolution(x, weight)).sin().sum(), (x, weight))
    close(own, torch.autograd.grad(functional.conv2d(x, weight).sin().sum(), (x, weight)))


def test_the_images_gradient_is_left_out_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, calls = layers.kernels(), []
    original = kernels.convolve
    monkeypatch.setattr(kernels, "convolve", lambda *a: calls.append(1) or original(*a))
    x, weight = random(CLIENTS, SAMPLES, 3, 8, 8), random(CLIENTS, 4, 3, 3, 3)
    vmap(grad(lambda w, x: served(layers.convolution(x, w)).sum()))(weight, x)
    assert len(calls) == 1


@pytest.mark.parametrize("windows", [{}, {"stride": 1}, {"stride": 2, "padding": 1}, {"dilation": 2, "stride": 1}])
@pytest.mark.parametrize("size", [2, (3, 2)])
@pytest.mark.parametrize("side", [8, 9])
def test_pooling(windows: dict[str, int], size: Any, side: int) -> None:
    x = random(CLIENTS, SAMPLES, 3, side, side)
    own = gradients(lambda a: served(layers.pooling(a, size, **windows)), (0,), x)
    close(own, gradients(lambda a: functional.max_pool2d(a, size, **windows), (0,), x))


@pytest.mark.parametrize("size", [(1, 2), (2, 2), (3, 2)])
def test_pooling_in_several_blocks_that_begin_within_a_row(monkeypatch: pytest.MonkeyPatch, size: Any) -> None:
    """Rows of 5 windows in blocks of 16, the last of which is not full; values are few, so that many are equal."""
    monkeypatch.setattr(layers.kernels(), "BLOCK", 16)
    x = random(CLIENTS, SAMPLES, 3, 6, 10).round()
    own = gradients(lambda a: served(layers.pooling(a, size)), (0,), x)
    close(own, gradients(lambda a: functional.max_pool2d(a, size), (0,), x))


@pytest.mark.parametrize(
    ("size", "options", "side"),
    [
        (4, {"padding": 1}, 4),
        ((4, 2), {"padding": (1, 0)}, 4),
        ((3, 2), {"stride": 2}, 6),
        (2, {"stride": 3, "padding": 1}, 4),
        (2, {"stride": 2, "dilation": 2, "padding": 1}, 4),
    ],
)
def test_pooling_by_windows_as_large_as_the_image_that_do_not_cover_it(
    size: Any, options: dict[str, Any], side: int
) -> None:
    """They overlap, or lie apart, or begin outside of it."""
    x = random(CLIENTS, SAMPLES, 3, side, side)
    own = gradients(lambda a: served(layers.pooling(a, size, **options)), (0,), x)
    close(own, gradients(lambda a: functional.max_pool2d(a, size, **options), (0,), x))


def test_pooling_whose_result_gets_no_gradient() -> None:
    """A function after it may give none, which is zero."""
    x = random(CLIENTS, SAMPLES, 3, 4, 4)
    (_, of_x) = gradients(lambda a: support.Cut()(served(layers.pooling(a, 2))), (0,), x)
    assert torch.equal(of_x, torch.zeros_like(x))


def test_pooling_and_concatenation_leave_images_as_they_lie() -> None:
    """Channels before samples, as products leave them: so the next product need not move them."""
    x = random(CLIENTS, 3, SAMPLES, 8, 8).transpose(1, 2)

    def layer(a: Tensor) -> Tensor:
        return served(layers.concatenation([served(layers.pooling(a, 2)), served(layers.pooling(-a, 2))], dim=1))

    own = gradients(layer, (0,), x)
    assert own[0].transpose(1, 2).is_contiguous()
    close(own, gradients(lambda a: torch.cat([functional.max_pool2d(b, 2) for b in (a, -a)], 1), (0,), x))
    assert layers.concatenation([x[0], x[0]]) is None
    assert layers.concatenation([x[0].contiguous(), x[0].contiguous()], dim=1) is None


def test_a_view_that_needs_a_copy_is_one() -> None:
    x = random(3, SAMPLES, 4).transpose(0, 1)
    with pytest.raises(RuntimeError):
        x.view(SAMPLES, -1)
    assert torch.equal(served(layers.view(x, SAMPLES, -1)), x.flatten(1))
    assert torch.equal(served(layers.view(x, (SAMPLES, 12))), x.flatten(1))
    assert layers.view(x, torch.int32) is None


def test_pooling_of_equal_values_and_of_none() -> None:
    """The first of equal values gets the gradient; a value that is no number is not lost."""
    x = torch.zeros(1, 1, 1, 4, 6, device=DEVICE)
    x[0, 0, 0, 0, 2:] = torch.tensor([5.0, float("nan"), float("nan"), 5.0])
    x[0, 0, 0, 2:, :2] = float("-inf")
    own, of_x = gradients(lambda a: served(layers.pooling(a, 2)), (0,), x)
    theirs, of_x_theirs = gradients(lambda a: functional.max_pool2d(a, 2), (0,), x)
    torch.testing.assert_close(own, theirs, equal_nan=True)
    torch.testing.assert_close(of_x, of_x_theirs, equal_nan=True)


@pytest.mark.parametrize("programs", [528, 20])
def test_a_weight_s_gradient_in_many_parts(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Of one block of pixels each, or of several, fewer in the last part; a second time the numbers are the same."""
    kernels = layers.kernels()
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "WEIGHT_GRADIENT", kernels.WEIGHT_GRADIENT._replace(rows=16, depth=16))
    x, gradient = random(2, 19, 3, 5, 5), random(2, 19, 4, 3, 3)
    first, second = (kernels.weight_gradient(x, gradient, (3, 3), (0, 0)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    of_weights = [torch.nn.grad.conv2d_weight(x[i], (4, 3, 3, 3), gradient[i]) for i in range(2)]
    close(first, (torch.stack(of_weights), gradient.sum((1, 3, 4))))


PRODUCTS: list[tuple[int, int, Any, dict[str, Any]]] = [
    (4, 6, 1, {}),
    (4, 6, 1, {"stride": 2}),
    (3, 4, 7, {"stride": 2, "padding": 3}),
    (5, 3, (3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    (5, 3, 3, {"padding": 1}),
    (3, 4, 3, {"padding": "same", "dilation": (2, 3)}),
    (2, 3, 1, {"padding": 2}),
]


@pytest.mark.parametrize(("channels", "out", "kernel", "options"), PRODUCTS)
def test_products(
    monkeypatch: pytest.MonkeyPatch, channels: int, out: int, kernel: Any, options: dict[str, Any]
) -> None:
    """For all clients at once, for images that lie otherwise and without bias, and for a client alone."""
    monkeypatch.setattr(convolutions, "MOST_CHANNELS", (0, 0))
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    x, weight, bias = random(CLIENTS, SAMPLES, channels, 9, 7), random(CLIENTS, out, channels, *size), random(3, out)

    def own(*given: Tensor) -> Tensor:
        return served(layers.convolution(*given, **options))

    def theirs(*given: Tensor) -> Tensor:
        return functional.conv2d(*given, **options)

    close(gradients(own, (0, 0, 0), x, weight, bias), gradients(theirs, (0, 0, 0), x, weight, bias))
    moved = x.transpose(1, 2).contiguous().transpose(1, 2)
    close(gradients(own, (0, 0), moved, weight), gradients(theirs, (0, 0), x, weight))
    alone = [tensor[0].clone().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.autograd.grad(theirs(*alone).sin().sum(), alone)
    close(torch.autograd.grad(own(*alone).sin().sum(), alone), expected)


def test_which_way_a_convolution_goes() -> None:
    """Few channels by our kernels, more or a stride by products, groups and what is too large by PyTorch."""

    def chosen(channels: int, out: int, stride: int = 1, groups: int = 1, samples: int = 2) -> str:
        x = torch.empty(1).expand(samples, channels, 8, 8)  # takes no memory
        windows = convolutions.Windows((3, 3), (stride, stride), (1, 1), (1, 1))
        weight = torch.empty(1).expand(out, channels // groups, 3, 3)
        return type(convolutions.way(x, weight, windows, groups, False)).__name__

    assert (chosen(32, 64), chosen(33, 64), chosen(32, 65), chosen(3, 16, 2)) == ("Direct", *["Products"] * 3)
    assert (chosen(64, 64, groups=64), chosen(64, 64, samples=2**20)) == ("NoneType",) * 2


@pytest.mark.parametrize(
    "options", [{"padding": "sane"}, {"padding": "same", "stride": 2}, {"groups": 2}, {"stride": 0}, {"dilation": 9}]
)
def test_other_convolutions_are_left_to_pytorch(options: dict[str, Any]) -> None:
    weight = random(4, 4 // options.get("groups", 1), 3, 3)
    assert layers.convolution(random(SAMPLES, 4, 8, 8), weight, **options) is None


def test_padding_on_one_side_only_is_left_to_pytorch() -> None:
    assert layers.convolution(random(SAMPLES, 4, 8, 8), random(4, 4, 3, 2), padding="same") is None


def test_images_too_large_to_count_are_left_to_pytorch() -> None:
    x = torch.empty(1, device=DEVICE).expand(2**12, 3, 2**9, 2**9)  # takes no memory
    assert layers.convolution(x, random(4, 3, 3, 3)) is None


def test_other_shapes_and_numbers_are_left_to_pytorch() -> None:
    assert layers.convolution(random(4, 8, 8), random(4, 4, 3, 3)) is None
    assert layers.convolution(random(SAMPLES, 4, 8, 8).double(), random(4, 4, 3, 3).double()) is None


def test_what_nobody_can_compute_is_left_to_pytorch_which_says_why() -> None:
    x, weight = random(SAMPLES, 3, 8, 8), random(4, 2, 3, 3)
    assert layers.convolution(x, weight) is None  # other channels
    assert layers.convolution(x[:, :2, :2], weight) is None  # smaller than the filter
    assert layers.convolution(x[:0, :2], weight) is None
    assert layers.convolution(x[:, :2], weight, random(4).double()) is None
    assert layers.convolution(x[:, :2], weight, random(1)) is None
    assert layers.convolution(x[:, :2], weight[0]) is None
    assert layers.convolution(x[:, :2], weight, padding=-1) is None
    assert layers.pooling(x, 2, padding=2) is None
    assert layers.pooling(x, 9) is None
    assert layers.pooling(x, 2, stride=0) is None
    assert layers.pooling(x[:0], 2) is None


@pytest.mark.parametrize("options", [{"ceil_mode": True}, {"return_indices": True}])
def test_other_poolings_are_left_to_pytorch(options: dict[str, Any]) -> None:
    assert layers.pooling(random(SAMPLES, 4, 8, 8), 2, **options) is None
    assert layers.pooling(random(SAMPLES, 4, 20, 20), 16) is None


@pytest.mark.parametrize("shape", [(SAMPLES,), (SAMPLES, 4)], ids=str)
def test_linear_layers(shape: tuple[int, ...]) -> None:
    """For all clients at once, for samples of all clients that lie otherwise, and for a client alone."""
    x, weight, bias = random(CLIENTS, *shape, 5), random(CLIENTS, 6, 5), random(CLIENTS, 6)

    def own(*given: Tensor) -> Tensor:
        return served(layers.linear(*given))

    close(gradients(own, (0, 0, 0), x, weight, bias), gradients(functional.linear, (0, 0, 0), x, weight, bias))
    common = x[0].transpose(0, -1).contiguous().transpose(0, -1)
    for dims in ((None, 0, 0), (None, None, 0)):
        given = common, weight if dims[1] == 0 else weight[0], bias
        close(gradients(own, dims, *given), gradients(functional.linear, dims, *given))
    alone = [tensor[0].clone().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.autograd.grad(functional.linear(*alone).sin().sum(), alone)
    close(torch.autograd.grad(own(*alone).sin().sum(), alone), expected)


def test_a_linear_layer_s_gradient_may_be_differentiated() -> None:
    x, weight, bias = random(CLIENTS, SAMPLES, 5), random(CLIENTS, 6, 5), random(CLIENTS, 6)

    def length(layer: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return grad(lambda x: layer(x, weight, bias).sin().sum())(x).square().sum()

    own, theirs = (
        vmap(grad(partial(length, layer), (0, 1, 2)))(x, weight, bias) for layer in (layers.linear, functional.linear)
    )
    close(own, theirs)


@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
def test_autocast_does_not_touch_numbers_of_other_kinds(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes with 64 bits even then, and refuses whole numbers."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    x, weight, bias = random(SAMPLES, 5), random(6, 5), random(6)
    assert served(layers.linear(x, weight, bias)).dtype == torch.bfloat16
    assert layers.linear(x.to(kind), weight.to(kind), bias.to(kind)) is None
    assert layers.linear(x.to(kind), weight, bias) is None
    assert layers.convolution(random(SAMPLES, 4, 8, 8).to(kind), random(4, 4, 3, 3)) is None


def test_other_linear_layers_are_left_to_pytorch() -> None:
    x, weight, bias = random(SAMPLES, 5), random(6, 5), random(6)
    assert layers.linear(x, weight) is None
    assert layers.linear(x[0], weight, bias) is None
    assert layers.linear(x[:, :4], weight, bias) is None
    assert layers.linear(x[:0], weight, bias) is None
    assert layers.linear(x, weight, bias[:1]) is None
    assert layers.linear(x, weight[0], bias) is None
    assert layers.linear(x.double(), weight.double(), bias.double()) is None
    assert layers.linear(x.double(), weight, bias) is None


def test_calls_on_a_cpu_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SERVED", {functional.max_pool2d: lambda *a, **k: pytest.fail("served")})
    with layers.StackedLayers():
        functional.max_pool2d(random(SAMPLES, 3, 8, 8).cpu(), 2)


class Convolutional(nn.Module):
    """What the kernels serve and what they do not, with layers that work in place right after them."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, stride=2),
            nn.ReLU(inplace=True), nn.Flatten(),
        )  # fmt: skip
        self.out = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


class NormedConvolutional(Convolutional):
    """The same with batch norm, whose clients train alone."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__(in_channels, classes)
        self.body.insert(1, nn.BatchNorm2d(4))


@pytest.mark.parametrize(
    ("network", "module", "names"),
    [
        (Convolutional, "pooled_kernels", {"convolve", "weight_gradient"}),
        (NormedConvolutional, "kernels", {"convolve", "weight_gradient", "pool", "unpool"}),
    ],
)
def test_a_federation_on_our_kernels_has_the_numbers_of_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: type[nn.Module], module: str, names: set[str]
) -> None:
    """With convolution, ReLU and pooling as one layer, and with batch norm between them."""
    settings: dict[str, Any] = {
        "models": (network,), "clients": 3, "batch_size": 7, "lr": 0.02, "device": DEVICE, "tf32": False,
        "rounds": 2 if DEVICE == "cuda" else 1,  # without a GPU, kernels are interpreted
        "training": {"momentum": 0.5, "weight_decay": 1e-2},
    }  # fmt: skip
    assert layers.kernels() is not None
    kernels, served = import_module(f"polyfed.engines.stacked.{module}"), Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(kernels, name)
        return lambda *given: (served.update([name]), original(*given))[1]

    for name in names:
        monkeypatch.setattr(kernels, name, counted(name))
    monkeypatch.setattr(layers, "on_gpu", lambda x: x.device.type == DEVICE)  # some checks are made on the CPU
    runs = []
    for engine in (SequentialEngine, VectorizedEngine):
        runs.append(support.federation(tmp_path / engine.__name__, "fedproto", engine, **settings))
        runs[-1].run()
        assert bool(served) == (engine is VectorizedEngine)
    assert set(served) == names
    assert not [event for event in runs[1].folder.events() if "one after another:" in str(event.get("note"))]
    for client in range(3):
        expected, actual = (run.engine.get_state(client) for run in runs)
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4)


def test_without_triton_pytorch_does_it_and_a_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("Failed to find\nC compiler")

    monkeypatch.setattr(compute, "import_module", broken)
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    monkeypatch.setattr(layers, "working_kernels", compute.working_kernels.__wrapped__)
    assert layers.kernels() is None
    assert layers.trouble() == "Failed to find C compiler"
    with layers.StackedLayers():
        assert functional.max_pool2d(random(SAMPLES, 3, 8, 8), 2).shape == (SAMPLES, 3, 4, 4)


def test_numbers_of_other_types_and_calls_by_name() -> None:
    x = random(SAMPLES, 3, 8, 8)
    expected = functional.max_pool2d(x, 2)
    for options in ({"kernel_size": np.int64(2)}, {"kernel_size": (2,), "stride": []}, {"kernel_size": [2, 2]}):
        assert torch.equal(served(layers.pooling(x, **options)), expected)
    assert layers.pairs(1, (1, 2, 3)) is None
    assert layers.pairs("same") is None


def served(result: Tensor | None) -> Tensor:
    assert result is not None
    return result
