"""Tables: columns of numbers and of categories become the float samples that a network accepts.

Numbers are filled (missing values get the median) and standardised; a category becomes one column per level, all 0
where it is missing. The constants for this come from training samples only: of all clients together in a simulation, or
from a file that the sites of a real federation have agreed on (`Constants`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from polyfed.data.dataset import Dataset
from polyfed.data.labels import MANY, no_regression
from polyfed.data.natural import with_clients
from polyfed.data.table_columns import (
    as_numbers,
    as_texts,
    check_categories,
    check_no_commas,
    holds_numbers,
    no_dates,
    with_texts_as_names,
)
from polyfed.errors import InputError, counted
from polyfed.settings import Settings

if TYPE_CHECKING:
    import pandas as pd

MOST_LEVELS = 100
"""A column of texts with more different values than this is a name or a number of a case, not a category."""


class Number(Settings):
    """How a column of numbers is prepared: (value − mean) / std, with `fill` for a missing value."""

    column: str
    fill: float
    mean: float
    std: float = Field(gt=0)


class Category(Settings):
    """How a column of categories is prepared: one column per level, 1 where the sample has it."""

    column: str
    levels: tuple[str, ...]
    unseen: tuple[str, ...] = ()
    """Levels that occurred in no training sample; their columns are 0 throughout."""


class Constants(Settings):
    """Everything that turns rows of a table into samples and labels. All sites of a federation must use the same."""

    format: Literal[1] = 1
    label: str
    classes: tuple[str, ...]
    numbers: tuple[Number, ...] = ()
    categories: tuple[Category, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The columns that are used, without the label's."""
        return [each.column for each in self.numbers] + [each.column for each in self.categories]

    @property
    def size(self) -> int:
        """How many numbers a row becomes."""
        return len(self.numbers) + sum(len(each.levels) for each in self.categories)

    def samples(self, frame: pd.DataFrame) -> Tensor:
        """`float32` [rows, features] of a frame with these columns."""
        parts = [
            ((as_numbers(frame[each.column]).fillna(each.fill) - each.mean) / each.std).to_numpy()[:, None]
            for each in self.numbers
        ]
        for category in self.categories:
            seen = np.array([level not in category.unseen for level in category.levels])
            levels = np.array(category.levels, dtype=object)
            parts.append((as_texts(frame[category.column])[:, None] == levels) & seen)
        return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))

    def samples_of(self, rows: Any, what: str) -> Tensor:
        """The same of rows that come after training; other columns, the label's for instance, are not used.

        Anything but a frame is refused: an array says neither which column is which nor whether it is prepared already.
        """
        if not hasattr(rows, "columns"):
            raise InputError(
                f"the model was trained on a table, so it can't predict a value of type {type(rows).__name__}: give "
                f"rows as they are in the table, in a frame with the columns {_shown(self.columns)}."
            )
        rows = with_texts_as_names(rows)
        _check_rows(self, rows, what, "the model needs")
        for each in self.numbers:
            if np.isinf(as_numbers(rows[each.column])).any():
                raise InputError(f"column '{each.column}' of {what} has infinite values: replace them.")
        return self.samples(rows)


@dataclass(frozen=True, eq=False)
class Table:
    """The rows behind a dataset, from which its samples are made."""

    frame: pd.DataFrame
    constants: Constants
    agreed: bool = False
    """Whether the constants were given; otherwise they are fitted when it is known who trains on what."""

    def fitted(self, rows: Tensor) -> Table:
        """The same table with constants from these rows, unless they are agreed."""
        if self.agreed:
            return self
        training = self.frame.iloc[rows.numpy()]
        numbers = _fit_numbers(training, [each.column for each in self.constants.numbers])
        categories = tuple(
            each.model_copy(update={"unseen": tuple(sorted({*each.levels} - {*as_texts(training[each.column])}))})
            for each in self.constants.categories
        )
        return replace(self, constants=self.constants.model_copy(update={"numbers": numbers, "categories": categories}))

    def samples(self) -> Tensor:
        return self.constants.samples(self.frame)

    def unfitted(self) -> dict[str, Tensor]:
        """What samples are made of, column by column: the same whichever rows the constants are fitted to."""
        if self.agreed:
            return {"samples": self.samples()}
        columns: dict[str, Tensor] = {}
        for number in self.constants.numbers:
            columns[number.column] = torch.tensor(as_numbers(self.frame[number.column]).to_numpy())
        for category in self.constants.categories:
            places = {level: place for place, level in enumerate(category.levels)}
            found = [places.get(text, -1) for text in as_texts(self.frame[category.column])]
            columns[f"{category.column} {category.levels}"] = torch.tensor(found)
        return columns

    @staticmethod
    def without_rows(constants: Constants) -> Table:
        """A table that only says how rows are prepared."""
        import pandas as pd  # here and below, because only tables need it

        return Table(pd.DataFrame(columns=constants.columns), constants, agreed=True)


def from_frame(
    frame: pd.DataFrame,
    label: str | None,
    test: pd.DataFrame | None = None,
    name: str = "table",
    *,
    client: str | None = None,
    drop: Collection[str] = (),
    constants: Constants | None = None,
) -> Dataset:
    """A dataset from the rows of a frame, where `label` is the column with the classes.

    Columns of numbers and booleans are standardised, columns of texts are categories; missing values are allowed in
    both. `client` is a column that says whose a row is, for the partition `natural`. `drop` names columns to leave out.
    Rows of `test` are kept for testing.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"age": [1.0, 3.0], "sex": ["f", "m"], "ill": ["no", "yes"]})
    >>> dataset = from_frame(frame, label="ill")
    >>> dataset.images.tolist(), dataset.class_names
    ([[-1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], ('no', 'yes'))
    """
    frame = with_texts_as_names(frame)
    _check_columns(frame, label, client, drop, name)
    assert label is not None
    rows = frame if test is None else _joined(frame, test, name)
    labels, classes = as_classes(rows[label], name, least=2 if constants is None else 1)
    if client is not None:
        _check_complete(rows[client], "client", name)
    if constants is None:
        used = [column for column in rows.columns if column not in (label, client, *drop)]
        constants = _plan(rows[used], label, classes, name)
        table = Table(rows, constants).fitted(torch.arange(len(frame)))
    else:
        _check_agreed(constants, rows, label, classes, name)
        labels = torch.tensor([constants.classes.index(classes[each]) for each in labels.tolist()])
        table = Table(rows, constants, agreed=True)
    dataset = Dataset(
        name,
        table.samples(),
        labels,
        len(table.constants.classes),
        official_test=0 if test is None else len(test),
        class_names=table.constants.classes,
        table=table,
    )
    return with_clients(dataset, None if client is None else rows[client].to_numpy())


def read_constants(path: Path) -> Constants:
    """The constants in a file that `save_constants` wrote."""
    try:
        return Constants.model_validate_json(path.read_text())
    except OSError as error:
        raise InputError(
            f"can't read the constants '{path}' ({error.strerror or error}): give the file that save_constants wrote."
        ) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise InputError(f"'{path}' holds no constants of a table: write them with save_constants.") from error


def save_constants(dataset: Dataset, path: Path | str) -> None:
    """Write the constants with which a table's samples were made, for other sites of the same federation."""
    if dataset.table is None:
        raise InputError(f"dataset '{dataset.name}' is no table, so it has no constants to save.")
    Path(path).write_text(json.dumps(dataset.table.constants.model_dump(mode="json"), indent=2) + "\n")


def as_classes(values: pd.Series[Any], name: str, least: int = 2) -> tuple[Tensor, tuple[str, ...]]:
    """Labels 0 … C − 1 and the classes' names: the values in ascending order, at least so many."""
    _check_complete(values, "label", name)
    if values.dtype.kind == "f":
        fractions = np.flatnonzero((values != values.round()).to_numpy())
        if len(fractions):
            raise no_regression(name, f"the value {values.iloc[fractions[0]]:g} at row {fractions[0]}")
        values = values.astype(np.int64)
    found = sorted(values.unique().tolist()) if values.dtype.kind in "iufb" else sorted({str(v) for v in values})
    if len(found) > MANY and 2 * len(found) > len(values):
        raise no_regression(name, f"{len(found)} different values in {len(values)} rows")
    if len(found) < least:
        raise InputError(f"the label '{values.name}' of '{name}' has a single value: a classifier needs 2 or more.")
    names = tuple(str(each) for each in found)
    numbers = {each: position for position, each in enumerate(names)}
    return torch.tensor([numbers[str(value)] for value in values]), names


def _check_complete(values: pd.Series[Any], what: str, name: str) -> None:
    missing = np.flatnonzero(values.isna().to_numpy())
    if len(missing):
        raise InputError(
            f"the {what} '{values.name}' of '{name}' is missing in {counted(len(missing), 'row')}, the first at "
            f"{missing[0]}: fill these in, or leave the rows out."
        )


def _check_columns(
    frame: pd.DataFrame, label: str | None, client: str | None, drop: Collection[str], name: str
) -> None:
    shown = _shown(list(frame.columns))
    if label is None:
        raise InputError(f"'{name}' is a table: say which column holds the classes, --label COLUMN of {shown}.")
    for what, column in [("label", label), ("client", client), *(("drop", each) for each in drop)]:
        if column is not None and column not in frame.columns:
            raise InputError(f"{what} is '{column}', but the columns of '{name}' are {shown}.")
    if label == client:
        raise InputError(f"'{label}' is given as the label and as the client: name two different columns.")
    for column in {label, client} & {*drop}:
        raise InputError(f"'{column}' is used and also a column to drop: leave it out of drop.")
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise InputError(f"'{name}' has several columns '{repeated[0]}': give each its own name.")
    if len(frame) == 0:
        raise InputError(f"'{name}' has no rows: give at least two.")


def _shown(columns: Sequence[str]) -> str:
    return ", ".join(columns[:12]) + (", …" if len(columns) > 12 else "")


def _joined(frame: pd.DataFrame, test: pd.DataFrame, name: str) -> pd.DataFrame:
    import pandas as pd

    test = with_texts_as_names(test)
    if set(test.columns) != set(frame.columns):
        odd = sorted(set(test.columns) ^ set(frame.columns))
        raise InputError(f"only one of training and test rows of '{name}' has the column '{odd[0]}': make them equal.")
    return pd.concat([frame, test[frame.columns]], ignore_index=True)


def _plan(frame: pd.DataFrame, label: str, classes: tuple[str, ...], name: str) -> Constants:
    """Which columns are numbers and which are categories, still without values that depend on samples."""
    from pandas import CategoricalDtype
    from pandas.api import types

    numbers, categories = [], []
    for column in frame.columns:
        values = frame[column]
        if values.isna().all():
            raise InputError(f"column '{column}' of '{name}' is empty: leave it out (drop={column}).")
        if holds_numbers(values):
            if not np.isfinite(as_numbers(values).dropna()).all():
                raise InputError(f"column '{column}' of '{name}' has infinite values: replace them.")
            numbers.append(Number(column=column, fill=0, mean=0, std=1))
            continue
        if types.is_datetime64_any_dtype(values) or types.is_timedelta64_dtype(values):
            raise no_dates(column, name, values.dropna().iloc[0])
        levels = sorted({*as_texts(values)} - {""})
        if not isinstance(values.dtype, CategoricalDtype):  # there the user has said what it is
            check_categories(levels, column, name)
        if len(levels) > MOST_LEVELS:
            raise InputError(
                f"column '{column}' of '{name}' has {len(levels)} different texts, too many for a category (at most "
                f"{MOST_LEVELS}): make numbers of them, or leave the column out (drop={column})."
            )
        categories.append(Category(column=column, levels=tuple(levels)))
    if not numbers and not categories:
        raise InputError(f"'{name}' has no column besides its label: give at least one.")
    return Constants(label=label, classes=classes, numbers=tuple(numbers), categories=tuple(categories))


def _fit_numbers(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[Number, ...]:
    if not columns:
        return ()
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    values = np.stack([as_numbers(frame[column]).to_numpy() for column in columns], axis=1)
    filler = SimpleImputer(strategy="median", keep_empty_features=True)
    scaler = StandardScaler().fit(filler.fit_transform(values))
    constants = zip(columns, filler.statistics_, scaler.mean_, scaler.scale_, strict=True)
    return tuple(Number(column=name, fill=fill, mean=mean, std=std) for name, fill, mean, std in constants)


def _check_agreed(constants: Constants, frame: pd.DataFrame, label: str, classes: tuple[str, ...], name: str) -> None:
    if constants.label != label:
        raise InputError(f"label is '{label}', but the agreed constants are for '{constants.label}'.")
    _check_rows(constants, frame, f"'{name}'", "the agreed constants name")
    unknown = [each for each in classes if each not in constants.classes]
    if unknown:
        raise InputError(
            f"'{name}' has the class '{unknown[0]}', but the agreed constants only know {', '.join(constants.classes)}."
        )
    for category in constants.categories:
        texts = {*as_texts(frame[category.column])} - {""}
        if texts and not texts & {*category.levels}:
            raise InputError(
                f"column '{category.column}' of '{name}' has none of the texts that the agreed constants name there "
                f"({_shown(category.levels)}), but '{min(texts)}': write them in the same way, or agree on these too."
            )


def _check_rows(constants: Constants, frame: pd.DataFrame, what: str, who: str) -> None:
    """Check that rows have the columns that are needed, with numbers where these are."""
    missing = [column for column in constants.columns if column not in frame.columns]
    if missing:
        raise InputError(f"{what} lacks the column '{missing[0]}', which {who}: add it.")
    for each in constants.numbers:
        values = frame[each.column]
        if not holds_numbers(values) and not values.isna().all():
            check_no_commas(sorted({*as_texts(values)} - {""}), each.column, what)
            raise InputError(f"column '{each.column}' of {what} has texts, but {who} numbers there: replace them.")
