"""Samples that stay on disk give the same datasets and the same runs as those in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import polyfed
from polyfed import population
from polyfed.assemble import data_facts
from polyfed.data import Dataset, from_arrays, from_torch_dataset, load_dataset, mapped
from polyfed.errors import InputError
from tests import support

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
LABELS = np.arange(40) % 4


def is_on_disk(dataset: Dataset) -> bool:
    """Whether the file is mapped where the samples are."""
    place = dataset.images.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= place < end:
            return line.endswith((".npz", ".npy"))
    return False


@pytest.mark.parametrize("x", [PIXELS, PIXELS.transpose(0, 3, 1, 2).copy(), (PIXELS / 255).astype(np.float32)])
def test_an_archive_stays_on_disk_and_gives_the_same_batches(tmp_path: Path, x: np.ndarray) -> None:
    np.savez(tmp_path / "a.npz", about="pixels", x=x, y=LABELS)
    near, far = load_dataset(f"npz:{tmp_path / 'a.npz'}"), load_dataset(f"npz:{tmp_path / 'a.npz'}?map=yes")
    assert is_on_disk(far) and not is_on_disk(near)
    assert torch.equal(near.images, far.images) and (near.mean, near.std) == (far.mean, far.std)
    rows = torch.tensor([3, 39, 0])
    assert torch.equal(near.batch(rows)[0], far.batch(rows)[0])
    assert data_facts(near, []) == data_facts(far, [])


def test_a_folder_of_arrays(tmp_path: Path) -> None:
    for name, array in (("x", PIXELS), ("y", LABELS), ("client", LABELS // 2)):
        np.save(tmp_path / f"{name}.npy", array)
    dataset = load_dataset(f"npz:{tmp_path}?map=yes")
    assert is_on_disk(dataset) and dataset.clients == 2 and dataset.labels.tolist() == LABELS.tolist()
    assert not is_on_disk(load_dataset(f"npz:{tmp_path}"))
    np.save(tmp_path / "x.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be read as an array"):
        load_dataset(f"npz:{tmp_path}")


def test_large_arrays_stay_on_disk_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", x=PIXELS, y=LABELS)
    monkeypatch.setattr(mapped, "physical_memory", lambda: 3 * PIXELS.nbytes)
    assert is_on_disk(load_dataset(f"npz:{tmp_path / 'a.npz'}"))
    assert not is_on_disk(load_dataset(f"npz:{tmp_path / 'a.npz'}?map=no"))


def test_a_users_own_mapping_is_not_read_into_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PIXELS)
    assert is_on_disk(from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"), LABELS))


def test_values_far_into_a_file_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "ROWS", 8)
    monkeypatch.setattr("polyfed.data.arrays.ROWS", 8)
    values = np.zeros((40, 3), np.float32)
    values[21, 1] = values[30, 2] = np.nan
    np.savez(tmp_path / "a.npz", x=values, y=LABELS)
    with pytest.raises(InputError, match=r"2 in all, .* NaN\) at index \[21, 1\]"):
        load_dataset(f"npz:{tmp_path / 'a.npz'}?map=yes")


def test_what_cannot_stay_on_disk_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=PIXELS, y=LABELS)
    with pytest.raises(InputError, match="compressed, so it can't stay on disk: save it with numpy.savez"):
        load_dataset(f"npz:{path}?map=yes")
    np.savez(path, x=PIXELS / 255, y=LABELS)
    with pytest.raises(InputError, match="float64 samples .* uint8 or float32"):
        load_dataset(f"npz:{path}?map=yes")
    np.savez(path, x=PIXELS, y=LABELS, x_test=PIXELS, y_test=LABELS)
    with pytest.raises(InputError, match="stays on disk, so x_test can't be joined"):
        load_dataset(f"npz:{path}?map=yes")
    with pytest.raises(InputError, match="map is 'maybe'"):
        load_dataset(f"npz:{path}?map=maybe")


def test_a_run_from_disk_has_the_same_numbers(tmp_path: Path) -> None:
    shape = support.tiny_dataset().input_shape
    x = np.random.default_rng(1).normal(size=(80, *shape)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(80) % 4)
    settings: dict[str, Any] = {"clients": 2, "rounds": 2, "models": [support.Wide], "device": "cpu", "progress": False}
    address = f"npz:{tmp_path / 'a.npz'}"
    for engine in ("sequential", "vectorized"):
        near, far = (polyfed.run("fedproto", data=address + way, engine=engine, **settings) for way in ("", "?map=yes"))
        weights, others = near.model(1).state_dict(), far.model(1).state_dict()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_torch_dataset_goes_to_disk_sample_by_sample(tmp_path: Path) -> None:
    samples = TensorDataset(torch.from_numpy(PIXELS), torch.from_numpy(LABELS))
    dataset = from_torch_dataset(samples, folder=tmp_path / "kept")
    assert is_on_disk(dataset) and torch.equal(dataset.images, from_torch_dataset(samples).images)
    again = load_dataset(f"npz:{tmp_path / 'kept'}")
    assert torch.equal(again.images, dataset.images) and again.labels.tolist() == LABELS.tolist()
    with pytest.raises(InputError, match="exists already: use data='npz:"):
        from_torch_dataset(samples, folder=tmp_path / "kept")
    with pytest.raises(InputError, match="can't have a test set of its own"):
        from_torch_dataset(samples, samples, folder=tmp_path / "other")
    mixed = [(torch.zeros(2), "a"), (torch.zeros(3), "b")]
    with pytest.raises(InputError, match="sample 1 .* make them the same"):
        from_torch_dataset(mixed, folder=tmp_path / "mixed")
    assert not (tmp_path / "mixed" / "x.npy").exists()


def test_a_gpu_that_is_too_small_is_named() -> None:
    dataset = from_arrays(PIXELS, LABELS)
    population._check_fits(dataset, dataset.images.nbytes)
    with pytest.raises(InputError, match="but the GPU has 0.0 GB left: use device cpu"):
        population._check_fits(dataset, dataset.images.nbytes - 1)
