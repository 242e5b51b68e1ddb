"""Texts as numbers of tokens, before networks accept them: rows of equal length, padded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.data.dataset import Dataset
from polyfed.data.files import one_line
from polyfed.data.source import missing
from polyfed.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

PADDING, UNKNOWN = "<padding>", "<unknown>"
"""The first two tokens of a vocabulary of words."""
AG_NEWS = ("World", "Sports", "Business", "Sci/Tech")


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts by their tokens, and their classes."""

    name: str
    tokens: Tensor
    """`int64` [texts, length]: places in the vocabulary."""
    labels: Tensor
    vocabulary: tuple[str, ...]
    class_names: tuple[str, ...]
    official_test: int = 0
    """The last this many texts are the source's own test set."""
    padding: int | None = None
    """The token that fills short texts up; None: all have the same length."""
    owners: Tensor | None = None
    """`int64` [texts]: whose each is."""
    client_names: tuple[str, ...] = ()

    def dataset(self) -> Dataset:
        """These texts as a dataset of token ids."""
        return Dataset(
            self.name,
            self.tokens,
            self.labels,
            len(self.class_names),
            official_test=self.official_test,
            class_names=self.class_names,
            owners=self.owners,
            client_names=self.client_names,
            vocabulary=len(self.vocabulary),
            padding=self.padding,
        )


def ag_news(folder: Path, length: int = 64, words: int = 20_000) -> Texts:
    """News in four topics, from train.csv and test.csv: the topic's number from 1, a title, a description."""
    import pandas as pd

    place = folder / "ag-news"
    train, test = (_read_news(place / f"{part}.csv") for part in ("train", "test"))
    both = pd.concat([train, test])
    texts = [_words(f"{title} {text}") for title, text in zip(both[1], both[2], strict=True)]
    vocabulary = vocabulary_of(texts[: len(train)], words)
    return Texts(
        "ag-news",
        as_tokens(texts, vocabulary, length),
        torch.tensor(both[0].to_numpy()) - 1,
        vocabulary,
        AG_NEWS,
        official_test=len(test),
        padding=0,
    )


def vocabulary_of(texts: Sequence[Sequence[str]], most: int) -> tuple[str, ...]:
    """The most frequent words, equally frequent ones in alphabetical order, after padding and unknown."""
    counts = Counter(word for text in texts for word in text)
    return PADDING, UNKNOWN, *sorted(counts, key=lambda word: (-counts[word], word))[: most - 2]


def as_tokens(texts: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int) -> Tensor:
    """Texts as rows of places in a vocabulary, cut or padded to a length.

    >>> as_tokens([["a", "b"], ["c"] * 4], (PADDING, UNKNOWN, "b", "a"), 3).tolist()
    [[3, 2, 0], [1, 1, 1]]
    """
    places = {word: place for place, word in enumerate(vocabulary)}
    rows = [[places.get(word, 1) for word in text[:length]] for text in texts]
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower().replace("\\", " "))


def _read_news(path: Path) -> pd.DataFrame:
    import pandas as pd

    if not path.is_file():
        raise missing("ag-news", str(path), "put train.csv and test.csv of AG News there")
    try:
        frame = pd.read_csv(path, header=None, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a table ({one_line(error)}): fetch it again.") from error
    if frame.shape[1] != 3 or not set(frame[0]) <= {1, 2, 3, 4}:
        raise InputError(f"{path} is not AG News, with a topic from 1 to 4, a title and a description: fetch it again.")
    return frame
