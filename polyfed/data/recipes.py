"""Named datasets besides the usual pictures: tables, signals, and those whose samples belong to people."""

from __future__ import annotations

from pathlib import Path

from polyfed.data.dataset import Dataset
from polyfed.data.leaf import femnist, shakespeare
from polyfed.data.sensors import motion, pamap2, uci_har
from polyfed.data.source import Source
from polyfed.data.tables import from_frame
from polyfed.data.texts import ag_news

NONE: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
"""No normalisation of pixels."""


def _table(source: Source, folder: Path, download: bool) -> Dataset:
    """A table that comes with scikit-learn."""
    from sklearn import datasets

    load = {"wine": datasets.load_wine, "breast-cancer": datasets.load_breast_cancer}[source.name]
    found = load(as_frame=True)
    frame = found.data.assign(kind=[str(found.target_names[label]) for label in found.target])
    return from_frame(frame, "kind", name=source.name)


def _text(source: Source, folder: Path, download: bool) -> Dataset:
    """Texts as token ids."""
    return {"shakespeare": shakespeare, "ag-news": ag_news}[source.name](folder).dataset()


RECIPES = (
    Source("wine", "chemical analyses of wines", 178, 3, (13,), "comes with scikit-learn", NONE, _table),
    Source("breast-cancer", "measurements of cells", 569, 2, (30,), "comes with scikit-learn", NONE, _table),
    Source("motion", "people in motion, 12 clients", 720, 6, (3, 64), "generated", NONE, motion),
    Source("femnist", "handwriting, by writer", 0, 62, (), "LEAF's JSON files in femnist/", NONE, femnist),
    Source("shakespeare", "next character, by role", 0, 80, (), "LEAF's JSON in shakespeare/", NONE, _text),
    Source("ag-news", "news in four topics", 0, 4, (), "train.csv and test.csv in ag-news/", NONE, _text),
    Source("uci-har", "people in motion, 30 clients", 0, 6, (), "unpack 'UCI HAR Dataset.zip'", NONE, uci_har),
    Source("pamap2", "people in motion, 9 clients", 0, 12, (), "unpack PAMAP2_Dataset.zip", NONE, pamap2),
)
"""Where the number of samples is 0, the files decide."""
