"""Float images in the layouts that people have."""

from pathlib import Path

import numpy as np
import pytest

import polyfed
from polyfed.data import from_arrays, load_dataset

COLOUR = np.arange(2 * 5 * 4 * 3, dtype=np.float32).reshape(2, 5, 4, 3) / 200
LABELS = np.array([0, 1])


def test_channels_last_and_grey_floats_get_their_channels_first() -> None:
    colour = from_arrays(COLOUR, LABELS, layout="channels-last")
    assert colour.input_shape == (3, 5, 4)
    assert float(colour.images[1, 2, 4, 0]) == COLOUR[1, 4, 0, 2]
    grey = from_arrays(COLOUR[..., 0], LABELS, COLOUR[..., 1], LABELS, layout="grey")
    assert grey.input_shape == (1, 5, 4) and grey.official_test == 2
    assert float(grey.images[3, 0, 4, 2]) == COLOUR[1, 4, 2, 1]
    assert from_arrays(COLOUR[..., 0], LABELS).input_shape == (5, 4)  # floats are used as they are


def test_an_archive_says_its_layout_in_the_address(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=COLOUR, y=LABELS)
    assert load_dataset(f"npz:{tmp_path / 'one.npz'}?layout=channels-last").input_shape == (3, 5, 4)
    for name in ("a", "b"):
        (tmp_path / "many").mkdir(exist_ok=True)
        np.savez(tmp_path / "many" / f"client-{name}.npz", x=COLOUR[..., 0], y=LABELS)
    many = load_dataset(f"npz:{tmp_path / 'many'}?layout=grey")
    assert many.input_shape == (1, 5, 4) and many.client_names == ("a", "b")


@pytest.mark.parametrize(
    ("x", "layout", "words"),
    [
        (COLOUR, "grey", "layout is 'grey', but the samples of 'arrays' have 3 dimensions instead of 2"),
        (COLOUR[..., 0], "channels-last", "have 2 dimensions instead of 3"),
        (COLOUR, "nhwc", "unknown layout 'nhwc'"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(x: np.ndarray, layout: str, words: str) -> None:
    with pytest.raises(polyfed.InputError, match=words):
        from_arrays(x, LABELS, layout=layout)
