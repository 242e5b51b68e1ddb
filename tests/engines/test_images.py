"""Images of a batch by the kernel, against looking them up, normalising and augmenting one after another."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from polyfed.data import Augmentation, Dataset
from polyfed.engines.client.batches import IMAGE, VIEWS, augmented
from polyfed.engines.stacked import layers
from polyfed.engines.stacked.images import images

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dataset(channels: int, height: int, width: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (9, channels, height, width), generator=generator, dtype=torch.uint8).to(DEVICE)
    means, deviations = (0.4, 0.5, 0.6)[:channels], (0.2, 0.25, 0.3)[:channels]
    return Dataset("some", pixels, torch.arange(9, device=DEVICE) % 3, 3, means, deviations)


@pytest.mark.skipif(not find_spec("triton"), reason="no Triton")
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 7, 12)])
@pytest.mark.parametrize("purposes", [(), (IMAGE,), VIEWS, (IMAGE, *VIEWS)], ids="-".join)
def test_the_kernel_shows_what_operations_show(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], purposes: tuple[str, ...]
) -> None:
    assert layers.kernels() is not None
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    some, rows = dataset(*shape), torch.tensor([4, 0, 8, 8, 3, 1] * 4, device=DEVICE)
    generator = torch.Generator().manual_seed(5)
    draws = {purpose: Augmentation().draw(generator, len(rows), shape) for purpose in purposes}
    draws = {purpose: {name: each.to(DEVICE) for name, each in own.items()} for purpose, own in draws.items()}
    found = images(some, rows, {p: {name: each.long() for name, each in own.items()} for p, own in draws.items()})
    expected = augmented(some.normalise(some.images.index_select(0, rows)), draws)
    assert (found[1] is None) == (expected[1] is None) == (VIEWS[0] not in purposes)
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
            assert ((one == 0) == (other == 0)).all()


@pytest.mark.skipif(not find_spec("triton"), reason="no Triton")
@pytest.mark.parametrize("change", ["flip", "erase", "crop"])
def test_each_change_can_be_left_out(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    some, rows = dataset(3, 32, 32), torch.arange(9, device=DEVICE)
    augmentation = Augmentation(**{change: False})
    draws = augmentation.draw(torch.Generator().manual_seed(5), 9, (3, 32, 32))
    draws = {name: each.to(DEVICE) for name, each in draws.items()}
    found, _ = images(some, rows, {IMAGE: draws})
    torch.testing.assert_close(found, augmentation.apply(some.normalise(some.images), draws), rtol=1e-6, atol=1e-6)
