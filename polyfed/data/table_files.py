"""Tables from files: CSV (comma, semicolon, tab or bar between columns, perhaps compressed) and Parquet."""

from __future__ import annotations

import gzip
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.data.dataset import Dataset
from polyfed.data.files import one_line
from polyfed.data.own import Address
from polyfed.data.table_columns import text_columns
from polyfed.data.tables import Constants, from_frame, read_constants
from polyfed.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

MISSING = ["?"]
"""Besides what pandas reads as missing (an empty field, NA, nan, …): how many public tables write it."""
SEPARATORS = ",;\t|"
ROW_NUMBERS = "Unnamed: 0"
"""What pandas calls the column of row numbers that `to_csv` writes."""


def read_table(address: Address, constants: Constants | None = None) -> Dataset:
    """The table in a file as a dataset; with these constants, or those that the address names, if any are agreed on."""
    options = address.options
    test = Path(options["test"]).expanduser() if "test" in options else None
    if "constants" in options:
        constants = read_constants(Path(options["constants"]).expanduser())
    drop = [column for column in options.get("drop", "").split(",") if column]
    # Codes are texts in all files if they are in one: in another all of them may look like numbers.
    agreed = [] if constants is None else [each.column for each in constants.categories]
    frame = read_frame(address.file, agreed)
    rows = None if test is None else read_frame(test, text_columns(frame))
    if rows is not None and (texts := {*text_columns(rows)} - {*text_columns(frame)}):
        frame = read_frame(address.file, [*agreed, *texts & {*frame.columns}])
    return from_frame(
        frame,
        options.get("label", constants.label if constants else None),
        rows,
        address.name,
        client=options.get("client"),
        drop=drop,
        constants=constants,
    )


def read_frame(path: Path, texts: Collection[str] = ()) -> pd.DataFrame:
    """The rows of a CSV or Parquet file; these columns hold texts, even where all of them look like numbers."""
    import pandas as pd

    if not path.is_file():
        raise InputError(f"there is no file {path}: give the path of a CSV or Parquet file.")
    try:
        if path.suffix.lower() == ".parquet":
            return pd.read_parquet(path)
        kinds = dict.fromkeys(texts, str)
        frame = pd.read_csv(path, sep=_separator(path), na_values=MISSING, skipinitialspace=True, dtype=kinds)
    except ImportError as error:
        raise InputError(f"to read {path}, install pyarrow (pip install pyarrow), or save the table as CSV.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not written in UTF-8: save it again as CSV in UTF-8, or as Parquet.") from error
    except (OSError, ValueError, EOFError, pd.errors.ParserError) as error:
        raise InputError(f"{path} cannot be read as a table ({one_line(error)}): repair the file.") from error
    if ROW_NUMBERS in frame and (frame[ROW_NUMBERS] == frame.index).all():
        frame = frame.drop(columns=ROW_NUMBERS)  # in a sorted table, these would give the class away
    return frame


def _separator(path: Path) -> str:
    """The separator that occurs most often in the first line."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        first = file.readline()
    return max(SEPARATORS, key=first.count)
