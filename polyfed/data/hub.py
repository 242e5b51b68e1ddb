"""Datasets of the Hugging Face hub by name, through their library `datasets`: what is in its local cache is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.data.dataset import Dataset
from polyfed.data.files import one_line
from polyfed.data.given import as_data
from polyfed.data.own import Address
from polyfed.errors import InputError, PolyfedError


def read_hub(address: Address) -> Dataset:
    """The dataset `hf:NAME?image=…&label=…`: its part train, with its part test, if it has one, for testing."""
    options = address.options
    found = _load(address)
    parts = found if isinstance(found, dict) else {"train": found}
    train, test = options.get("train", "train"), options.get("test", "test")
    for part in [train, *([test] if "test" in options else [])]:
        if part not in parts:
            raise InputError(f"'{address.path}' has the parts {', '.join(parts)}, not '{part}': choose train=PART.")
    chosen = {"train": parts[train], **({"test": parts[test]} if test in parts and test != train else {})}
    dataset = as_data(chosen, {name: options.get(name) for name in ("label", "client", "image")})
    assert isinstance(dataset, Dataset)
    return replace(dataset, name=address.name)


def _load(address: Address) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"'{address.text}' needs the library datasets: install it with pip install 'polyfed[hf]'."
        ) from error
    try:
        if Path(address.path).expanduser().is_dir() and any(address.file.glob("*.json")):
            return datasets.load_from_disk(str(address.file))
        return datasets.load_dataset(address.path, address.options.get("config"))
    except PolyfedError:
        raise
    except Exception as error:  # the library, its network and its readers raise many kinds
        raise InputError(
            f"the dataset '{address.path}' can't be loaded from the Hugging Face hub or its local cache "
            f"({one_line(error)}): check its name, or load it once with internet access."
        ) from error
