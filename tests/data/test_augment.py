"""Augmentation: each change alone, all together against a plain loop, and under vmap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyfed.data import Augmentation
from polyfed.errors import InputError
from polyfed.seeds import torch_generator

SHAPE = (3, 12, 10)


def pictures(count: int, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    """Random pixels, none of them zero."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(5)) + 1


def plain_loop(images: Tensor, draws: dict[str, Tensor], padding: int = 4) -> Tensor:
    """The same changes as their definition: flip, erase, then cut out of the zero-padded picture."""
    result = []
    for number, image in enumerate(images):
        draw = {name: int(values[number]) for name, values in draws.items()}
        image = image.flip(-1).clone() if draw.get("flip") else image.clone()
        if "erase_top" in draw:
            top, left = draw["erase_top"], draw["erase_left"]
            image[:, top : top + draw["erase_height"], left : left + draw["erase_width"]] = 0
        if "crop_down" in draw:
            top, left = draw["crop_down"] + padding, draw["crop_right"] + padding
            padded = torch.nn.functional.pad(image, (padding,) * 4)
            image = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        result.append(image)
    return torch.stack(result)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("crop", [True, False])
def test_any_combination_equals_the_plain_loop(flip: bool, erase: bool, crop: bool) -> None:
    augmentation, images = Augmentation(flip=flip, erase=erase, crop=crop), pictures(64)
    draws = augmentation.draw(torch_generator(0, "augment"), 64, SHAPE)
    before = images.clone()
    assert torch.equal(augmentation.apply(images, draws), plain_loop(images, draws))
    assert torch.equal(images, before)
    assert bool(draws) == (flip or erase or crop)


def test_a_seed_draws_what_it_always_has() -> None:
    """Other draws from the same seed would change all results with augmented images."""
    draws = Augmentation().draw(torch.Generator().manual_seed(0), 6, (3, 32, 32))
    assert {name: values.tolist() for name, values in draws.items()} == {
        "flip": [True, False, True, True, True, False],
        "erase_top": [16, 2, 13, 4, 10, 14],
        "erase_left": [15, 16, 5, 19, 14, 3],
        "erase_height": [0, 0, 0, 11, 15, 0],
        "erase_width": [10, 11, 10, 9, 10, 13],
        "crop_down": [0, 3, 4, 0, 4, -2],
        "crop_right": [2, 3, -4, 1, -1, 0],
    }


def test_flip_flips_about_half() -> None:
    augmentation, images = Augmentation(erase=False, crop=False), pictures(400)
    result = augmentation.apply(images, augmentation.draw(torch_generator(0), 400, SHAPE))
    flipped = (result == images.flip(-1)).flatten(1).all(1)
    kept = (result == images).flatten(1).all(1)
    assert bool((flipped ^ kept).all()) and 150 < int(flipped.sum()) < 250


def test_crop_shifts_by_up_to_four_and_zeros_move_in() -> None:
    augmentation = Augmentation(flip=False, erase=False)
    draws = augmentation.draw(torch_generator(0), 500, SHAPE)
    assert set(draws["crop_down"].tolist()) == set(draws["crop_right"].tolist()) == set(range(-4, 5))
    images = pictures(1)
    result = augmentation.apply(images, {"crop_down": torch.tensor([2]), "crop_right": torch.tensor([-3])})
    assert torch.equal(result[:, :, :-2, 3:], images[:, :, 2:, :-3])
    assert not result[:, :, -2:].any() and not result[:, :, :, :3].any()


def test_erased_areas_keep_their_bounds() -> None:
    augmentation = Augmentation(flip=False, crop=False)
    draws = augmentation.draw(torch_generator(0), 2000, (3, 32, 32))
    heights, widths = draws["erase_height"].double(), draws["erase_width"].double()
    happens = heights > 0
    assert 850 < int(happens.sum()) < 1150
    area = (heights * widths)[happens] / 1024
    # Sides are whole pixels, so the bounds hold up to half a pixel on each side.
    assert 0.03 < float(area.min()) < 0.05 and 0.19 < float(area.max()) < 0.23
    ratio = (heights / widths)[happens]
    assert 0.4 < float(ratio.min()) < 0.6 and 1.7 < float(ratio.max()) < 2.4
    assert bool((draws["erase_top"] + draws["erase_height"] <= 32).all()) and int(draws["erase_top"].min()) == 0
    assert bool((draws["erase_left"] + draws["erase_width"] <= 32).all()) and int(draws["erase_left"].min()) == 0
    result = augmentation.apply(pictures(2000, (3, 32, 32)), draws)
    erased = (result == 0).flatten(2).sum(2)
    assert torch.equal(erased, (heights * widths).long().unsqueeze(1).expand(2000, 3))


def test_rectangles_fit_into_flat_pictures() -> None:
    draws = Augmentation().draw(torch_generator(0), 200, (1, 2, 40))
    assert bool((draws["erase_top"] + draws["erase_height"] <= 2).all())


def test_same_generator_same_draws() -> None:
    one, same, other = (Augmentation().draw(torch_generator(seed), 20, SHAPE) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_vmap_over_clients_equals_a_loop_over_clients() -> None:
    augmentation = Augmentation()
    images = pictures(24).view(4, 6, *SHAPE)
    drawn = [augmentation.draw(torch_generator(client), 6, SHAPE) for client in range(4)]
    stacked = {name: torch.stack([draws[name] for draws in drawn]) for name in drawn[0]}
    together = torch.func.vmap(augmentation.apply)(images, stacked)
    assert torch.equal(together, torch.stack([augmentation.apply(images[c], drawn[c]) for c in range(4)]))


def test_no_images_are_possible() -> None:
    draws = Augmentation().draw(torch_generator(0), 0, SHAPE)
    assert Augmentation().apply(torch.zeros(0, *SHAPE), draws).shape == (0, *SHAPE)


def test_tables_cannot_be_augmented() -> None:
    with pytest.raises(InputError, match="switch augmentation off"):
        Augmentation().draw(torch_generator(0), 4, (7,))
