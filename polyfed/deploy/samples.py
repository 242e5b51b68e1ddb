"""A site's own samples, brought to what the federation agreed on: classes, shape, normalisation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.addresses import load_object, names_code
from polyfed.data import Dataset, from_arrays, from_torch_dataset, load_dataset, parse_address
from polyfed.data.columns import is_frame
from polyfed.data.files import read_arrays
from polyfed.data.folders import read_folder
from polyfed.data.own import Address
from polyfed.data.table_files import read_table
from polyfed.data.tables import from_frame
from polyfed.data.torch_datasets import no_dataset
from polyfed.deploy.groups import CommonTask
from polyfed.errors import InputError, PolyfedError, first_line, user_place

BY_NAME = ("folder", "table")
"""Kinds of data whose classes have names and no numbers of their own."""
MODES = {1: "grey", 3: "colour"}


def agreed_samples(
    data: str, common: CommonTask, folder: Path, *, data_folder: Path | None = None, label: str | None = None
) -> Dataset:
    """The samples that a site's setting `data` names, as the federation agreed on them."""
    address = parse_address(data)
    if address is not None:
        found = _read(address, common, folder, label)
    elif names_code(data):
        found = _called(data, common, folder)
    else:
        found = load_dataset(data, data_folder, label=label)
    if found.clients > 1:
        raise InputError(
            f"the samples of '{found.name}' are those of {found.clients} clients, but a site is one client: give it "
            "its own samples only."
        )
    _check_form(found, common)
    return replace(
        found,
        labels=_agreed_labels(found, common, by_name=address is not None and address.kind in BY_NAME),
        classes=common.count,
        class_names=common.names,
        mean=common.mean,
        std=common.std,
    )


def _read(address: Address, common: CommonTask, folder: Path, label: str | None) -> Dataset:
    """Data in files, whose paths begin in the folder of site.yaml."""
    files = {name: _inside(folder, path) for name, path in address.options.items() if name == "test"}
    here = replace(address, path=_inside(folder, address.path), options={**address.options, **files})
    if address.kind == "npz":
        return _archive(here.file, common.count, here.options.get("map"), here.options.get("layout", "auto"))
    if address.kind == "table":
        if common.constants is None or "constants" in address.options:
            raise _no_constants()
        return read_table(here.with_settings(label=label), common.constants)
    if address.kind == "folder" and len(common.input_shape) == 3 and common.input_shape[0] in MODES:
        channels, height, width = common.input_shape
        agreed = {"size": f"{height}x{width}", "mode": MODES[channels]}
        here = replace(here, options={**agreed, **here.options})
    if address.kind == "folder":  # other members may have the other classes
        return read_folder(here.with_settings(label=label), least=1)
    return load_dataset(here.text, label=label)


def _no_constants() -> InputError:
    return InputError(
        "a federation with tables agrees on how columns become numbers: name the file of these constants in the terms "
        "(task.constants), not in the address; polyfed.data.save_constants writes it."
    )


def _archive(path: Path, classes: int, map: str | None, layout: str) -> Dataset:
    """Arrays in an npz file, in which some of the agreed classes may be missing."""
    arrays: dict[str, Any] = dict(read_arrays(path, "save it with numpy.savez(path, x=…, y=…)", map))
    x, y = (arrays.pop(f"{name}_train", arrays.pop(name, None)) for name in "xy")
    if x is None or y is None:
        raise InputError(f"{path} lacks {'x' if x is None else 'y'}: save x, y and perhaps x_test, y_test in it.")
    x_test, y_test = (arrays.pop(f"{name}_test", None) for name in "xy")
    names = arrays.pop("class_names", None)
    if arrays:
        raise InputError(f"{path} also holds an array '{min(arrays)}', which a site does not use: leave it out.")
    return from_arrays(x, y, x_test, y_test, path.stem, layout=layout, **_classes(y, classes, names))


def _classes(y: Any, classes: int, names: Any = None) -> dict[str, Any]:
    """What to tell about classes: their names, or their number, unless labels are names themselves."""
    if names is not None:
        return {"class_names": [str(name) for name in np.asarray(names).reshape(-1)]}
    return {} if np.asarray(y).dtype.kind in "USO" else {"classes": classes}


def _inside(folder: Path, path: str) -> str:
    return str(folder / Path(path).expanduser())


def own_object(address: str, folder: Path) -> object:
    """What an address in site.yaml names; a module next to that file comes first."""
    found = load_object(address)
    name = address.partition(":")[0]
    file = getattr(sys.modules[name], "__file__", None)
    beside = [folder / f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    if file and any(path.exists() for path in beside) and not Path(file).resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"'{address}' would be that of {file}, because a module of that name is imported already, not the one in "
            f"'{folder}': give that module another name."
        )
    return found


def _called(address: str, common: CommonTask, folder: Path) -> Dataset:
    """What the user's own function returns, as a dataset."""
    found, classes = own_object(address, folder), common.count
    name = address.rpartition(":")[2]
    if callable(found) and not isinstance(found, torch.utils.data.Dataset):
        try:
            found = found()
        except PolyfedError:
            raise
        except Exception as error:
            raise InputError(f"{address}() fails: {first_line(error)}{user_place(error)}.") from error
    if isinstance(found, Dataset):
        return found
    if is_frame(found):
        if common.constants is None:
            raise _no_constants()
        return from_frame(found, common.constants.label, name=name, constants=common.constants)
    if isinstance(found, tuple | list) and len(found) in (2, 4) and all(_is_array(part) for part in found):
        x, y, x_test, y_test = (*found, None, None)[:4]
        return from_arrays(x, y, x_test, y_test, name, **_classes(y, classes))
    if isinstance(found, tuple) and len(found) == 2 and all(hasattr(part, "__getitem__") for part in found):
        return from_torch_dataset(*found, name=name, classes=_unless_named(found[0], classes))
    if hasattr(found, "__getitem__") and hasattr(found, "__len__") and not _is_array(found):
        return from_torch_dataset(found, name=name, classes=_unless_named(found, classes))
    raise InputError(str(no_dataset(found)).replace("data is", f"{address} gives", 1))


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | Tensor)


def _unless_named(dataset: object, classes: int) -> int | None:
    """The number of classes for a dataset that does not list their names."""
    names = getattr(dataset, "classes", None)
    return None if isinstance(names, Sequence) and not isinstance(names, str) else classes


def _check_form(found: Dataset, common: CommonTask) -> None:
    if found.input_shape != common.input_shape:
        raise InputError(
            f"the samples of '{found.name}' have shape {list(found.input_shape)}, but the federation agreed on "
            f"{list(common.input_shape)} (task.input_shape): resize them, or agree on another shape."
        )
    if (found.vocabulary, found.padding) != (common.vocabulary, common.padding):
        raise InputError(
            f"the samples of '{found.name}' have the vocabulary {found.vocabulary} and the padding {found.padding}, "
            f"but the federation agreed on {common.vocabulary} and {common.padding} (task.vocabulary, task.padding): "
            "prepare them in the same way, or agree on other ones."
        )
    pixels = found.images.dtype == torch.uint8
    if pixels and not common.mean:
        raise InputError(
            f"the samples of '{found.name}' are pixels (uint8), but the federation agreed on float data, without "
            "task.mean and task.std: normalise them to floats, or agree on a mean and a std."
        )
    if not pixels and common.mean:
        raise InputError(
            f"the samples of '{found.name}' are floats, but the federation agreed on pixels, which are normalised "
            "with task.mean and task.std: give them as uint8 images."
        )


def _agreed_labels(found: Dataset, common: CommonTask, *, by_name: bool) -> Tensor:
    """Labels by the agreed numbers; names decide where both sides have them."""
    names = found.class_names
    if not names or (not common.names and not by_name):
        high = int(found.labels.max())
        if high >= common.count:
            raise InputError(
                f"'{found.name}' has labels up to {high}, but the federation agreed on {common.count} classes, "
                f"numbered from 0 to {common.count - 1}."
            )
        return found.labels
    agreed = common.names or tuple(str(number) for number in range(common.count))
    numbers = torch.full((len(names),), -1)
    for number, name in enumerate(names):
        if name in agreed:
            numbers[number] = agreed.index(name)
    labels: Tensor = numbers[found.labels]
    if bool((labels < 0).any()):
        unknown = names[int(found.labels[labels < 0][0])]
        listed = ", ".join(agreed[:10]) + (", …" if len(agreed) > 10 else "")
        remedy = "rename it, leave these samples out, or agree on it too"
        if not common.names:
            remedy = "agree on the classes' names (task.classes), because their order alone could differ between sites"
        raise InputError(
            f"'{found.name}' has the class '{unknown}', which is not one that the federation agreed on ({listed}): "
            f"{remedy}."
        )
    return labels
