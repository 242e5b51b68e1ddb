"""The address of a user's own data: a kind, a path, and options after a question mark.

folder:pictures?size=64
table:patients.csv?label=outcome&drop=id,name
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from polyfed.errors import InputError, unknown_name


@dataclass(frozen=True)
class Address:
    """Where a user's own data are, and how to read them."""

    kind: str
    path: str
    options: Mapping[str, str] = field(default_factory=dict)

    KINDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "npz": ("layout", "map"),
        "folder": ("size", "mode"),
        "table": ("label", "client", "drop", "test", "constants"),
        "hf": ("image", "label", "client", "config", "train", "test"),
    }
    """Every kind with its options."""

    @property
    def file(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def name(self) -> str:
        """What the dataset is called."""
        return Path(self.path).stem or self.path

    @property
    def text(self) -> str:
        """The address as a user writes it."""
        options = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind}:{self.path}{'?' if options else ''}{options}"

    def with_settings(self, **settings: str | None) -> Address:
        """The same with these settings as options; one that does not exist for this kind is refused."""
        given = {name: value for name, value in settings.items() if value is not None}
        for name, value in given.items():
            if name not in self.KINDS[self.kind]:
                raise no_columns(name, value, self.text)
            if self.options.get(name, value) != value:
                raise InputError(
                    f"{name} is '{value}', but the data '{self.text}' say '{self.options[name]}': keep one of them."
                )
        return replace(self, options={**self.options, **given})

    def moved(self, began_in: Path) -> Address:
        """The same with paths resolved from a folder, where they do not exist here but there."""

        def found(path: str) -> str:
            there = began_in / path
            return str(there) if not Path(path).expanduser().exists() and there.exists() else path

        files = {name: found(value) for name, value in self.options.items() if name in ("test", "constants")}
        if self.kind == "hf":
            return self
        return replace(self, path=found(self.path), options={**self.options, **files})


def parse_address(text: str) -> Address | None:
    """The address in a text; None if it is none, but the name of a dataset.

    >>> parse_address("table:a.csv?label=kind&drop=id")
    Address(kind='table', path='a.csv', options={'label': 'kind', 'drop': 'id'})
    >>> parse_address("digits")
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in Address.KINDS:
        return None
    # A question mark may be part of a path; options have an equals sign.
    path, mark, query = rest.rpartition("?")
    if not mark or "=" not in query:
        path, query = rest, ""
    if not path:
        raise InputError(f"data is '{text}', which names no path: write {kind}:PATH.")
    return Address(kind, path, _options(query, kind))


def guess_address(path: str) -> Address:
    """The address of a path without a kind, by what is there."""
    place = Path(path).expanduser()
    if place.is_dir():
        return Address("npz" if any(place.glob("*.np[yz]")) else "folder", path)
    table = {suffix.lower() for suffix in Path(path).suffixes} & {".csv", ".tsv", ".parquet"}
    return Address("table" if table else "npz", path)


def no_columns(name: str, value: str, data: str) -> InputError:
    """The error for a column that is named for data without columns."""
    return InputError(f"{name} is '{value}', but the data '{data}' have no columns to choose from: leave it out.")


def _options(query: str, kind: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, equals, value = pair.partition("=")
        known: Collection[str] = Address.KINDS[kind]
        if name not in known:
            raise unknown_name(f"option of {kind}:PATH", name, known)
        if not equals or not value:
            raise InputError(f"the option '{name}' of {kind}:PATH has no value: write {name}=VALUE.")
        if name in options:
            raise InputError(f"the option '{name}' of {kind}:PATH is given twice: keep one.")
        options[name] = value
    return options
