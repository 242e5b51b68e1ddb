"""Natural partitions: clients keep what is their own, whichever way the data say whose it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import polyfed
from polyfed.data import Dataset, from_arrays, load_dataset, partition, save_npz
from polyfed.errors import InputError
from tests import support

RUN: dict[str, Any] = {"rounds": 2, "models": [support.Wide], "batch_size": 4, "device": "cpu", "progress": False}


def arrays(sizes: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Floats that networks of `support` accept, labels, and whose they are: client c has sizes[c] samples."""
    shape, count = support.tiny_dataset().input_shape, sum(sizes)
    labels = np.arange(count) % 4
    noise = np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)
    return noise + labels.reshape(-1, *[1] * len(shape)), labels, np.repeat([f"p{n}" for n in range(len(sizes))], sizes)


def owned(dataset: Dataset, sizes: list[int], **settings: Any) -> list[polyfed.data.ClientData]:
    return partition(dataset, "natural", len(sizes), **settings)


def test_each_client_keeps_its_samples_and_splits_them_by_itself() -> None:
    """8:1:1 of 20 samples is 16, 2, 2, and of 10 it is 8, 1, 1."""
    x, y, client = arrays([20, 10])
    dataset = from_arrays(x, y, client=client)
    assert dataset.clients == 2 and dataset.client_names == ("p0", "p1") and "of 2 clients" in repr(dataset)
    first, second = owned(dataset, [20, 10])
    assert torch.cat(first.parts).sort().values.tolist() == list(range(20))
    assert torch.cat(second.parts).sort().values.tolist() == list(range(20, 30))
    assert [len(part) for part in first.parts] == [16, 2, 2] and [len(part) for part in second.parts] == [8, 1, 1]


def test_numbers_of_clients_are_ordered_by_size_and_need_not_be_without_gaps() -> None:
    x, y, _ = arrays([12])
    dataset = from_arrays(x, y, client=np.repeat([10, 9, 2], 4))
    assert dataset.client_names == ("2", "9", "10") and dataset.owners is not None
    assert dataset.owners.tolist() == [2] * 4 + [1] * 4 + [0] * 4


def test_a_client_is_tested_on_its_own_test_set_and_others_on_a_part_of_their_samples() -> None:
    x, y, client = arrays([20, 20])
    dataset = from_arrays(x, y, x[:3], y[:3], client=client, client_test=["p1"] * 3)
    first, second = owned(dataset, [20, 20], split="8:1:1")
    assert second.test.tolist() == [40, 41, 42] and len(second.train) + len(second.validation) == 20
    assert [len(part) for part in first.parts] == [16, 2, 2] and int(first.test.max()) < 20
    pooled = owned(dataset, [20, 20], split="8:1:1", test_set="pooled")
    assert len(pooled[1]) == 23 and len(pooled[0]) == 20


def test_a_test_set_that_is_nobodys_is_shared_out_by_classes() -> None:
    x, y, client = arrays([20, 20])
    first, second = owned(from_arrays(x, y, x[:8], y[:8], client=client), [20, 20])
    assert sorted([*first.test.tolist(), *second.test.tolist()]) == list(range(40, 48))
    assert len(first.test) == 4


def test_clients_of_all_samples_may_be_given_at_once() -> None:
    x, y, client = arrays([8, 8])
    both = from_arrays(x, y, x[:2], y[:2], client=[*client, "p0", "p1"])
    assert both.owners is not None and both.owners[-2:].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("client", "client_test", "words"),
    [
        (["a"] * 5, None, "12 training and 2 test samples, but says of 5 and 0"),
        (["a"] * 12, ["a"], "of 12 and 1 whose"),
        (["a"] * 12, ["a", "b"], "client 'b' .* has test samples but none to train on"),
        (None, ["a", "a"], "client_test without client"),
        ([0.5] * 12, None, "values missing"),
        ([np.nan] * 12, None, "values missing"),
        ([None, *["a"] * 11], None, "values missing"),
        (np.array([np.nan, *["a"] * 11], dtype=object), None, "values missing"),
    ],
)
def test_client_arrays_are_checked(client: Any, client_test: Any, words: str) -> None:
    x, y, _ = arrays([12])
    with pytest.raises(InputError, match=words):
        from_arrays(x, y, x[:2], y[:2], client=client, client_test=client_test)


def test_contradictions_and_gaps_are_refused() -> None:
    x, y, client = arrays([8, 8])
    dataset = from_arrays(x, y, client=client)
    with pytest.raises(InputError, match="are those of 2 clients, but clients is 3: leave clients out"):
        partition(dataset, "natural", 3)
    with pytest.raises(InputError, match="needs to know whose"):
        partition(from_arrays(x, y), "natural", 2)
    with pytest.raises(InputError, match="released-code.*shares only"):
        partition(from_arrays(x, y, x, y, client=client), "natural", 2, split="released-code")
    with pytest.raises(InputError, match=r"client p1 of 'arrays' has only 0 samples not for testing, fewer than 1"):
        partition(replace(dataset, owners=torch.zeros(16, dtype=torch.int64)), "natural", 2)
    with pytest.raises(InputError, match="client p0 .* has only 8 samples .* fewer than 9.*lower min_samples"):
        partition(dataset, "natural", 2, minimum=8 + 1)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    x, y, client = arrays([24, 12, 16])
    np.savez(tmp_path / "people.npz", x=x, y=y, client=client, class_names=np.array(["a", "b", "c", "d"]))
    return tmp_path / "people.npz"


def test_clients_follow_from_the_data(archive: Path, tmp_path: Path) -> None:
    result = polyfed.run("fedproto", data=archive, out=tmp_path / "run", **RUN)
    assert (result.folder.config.clients, result.folder.config.partition) == (3, "natural")
    assert [len(own) for own in result.population.data.values()] == [24, 12, 16] and len(result.clients) == 3
    assert result.population.dataset.class_names == tuple("abcd")
    assert any("3 clients (p0, p1, p2) keep their own samples" in note for note in result.population.notes)
    again = polyfed.resume(tmp_path / "run", models=[support.Wide], rounds=3, progress=False)
    assert again.summary["rounds"] == 3 and len(again.clients) == 3


def test_a_number_of_clients_or_another_partition_is_respected_or_refused(archive: Path) -> None:
    with pytest.raises(InputError, match="are those of 3 clients, but clients is 5"):
        polyfed.run("standalone", data=archive, clients=5, **RUN)
    assert len(polyfed.run("standalone", data=archive, clients=3, **RUN).clients) == 3
    mixed = polyfed.run("standalone", data=archive, partition="iid", clients=4, **RUN)
    assert len(mixed.clients) == 4 and mixed.folder.config.partition == "iid"
    with pytest.raises(InputError, match="'digits' does not say it"):
        polyfed.run("standalone", partition="natural", **RUN)
    with pytest.raises(InputError, match="partition is given, which stands for lists of indices"):
        polyfed.run("standalone", data=archive, partition="given", **RUN)
    with pytest.raises(InputError, match="min_replies is 4, but must be at most 3"):
        polyfed.run("standalone", data=archive, min_replies=4, **RUN)


def test_engines_agree_on_clients_of_different_sizes(archive: Path) -> None:
    engines = ("sequential", "threads", "vectorized")
    one, threads, stacked = (polyfed.run("fedproto", data=archive, engine=name, **RUN) for name in engines)
    for client in range(3):
        weights, same, near = (result.model(client).state_dict() for result in (one, threads, stacked))
        assert all(torch.equal(weights[name], same[name]) for name in weights)
        assert all(torch.allclose(weights[name], near[name], atol=1e-5) for name in weights)


def test_a_comparison_recognises_its_finished_runs(archive: Path, tmp_path: Path) -> None:
    settings = {**RUN, "data": archive, "seeds": [0], "out": tmp_path / "found", "baseline": None}
    del settings["progress"]
    polyfed.compare(["standalone"], **settings)
    lines: list[str] = []
    again = polyfed.compare(["standalone"], tell=lines.append, **settings)
    assert not again.failures and not any("to do" in line for line in lines)


def test_lists_of_indices_are_a_partition() -> None:
    x, y, _ = arrays([40])
    lists = [list(range(0, 16)), torch.arange(16, 30)]
    result = polyfed.run("standalone", data=(x, y), partition=lists, **RUN)
    assert [len(own) for own in result.population.data.values()] == [16, 14]
    assert result.folder.config.partition == "given" and result.folder.config.clients == 2
    assert any("10 stay unused" in note for note in result.population.notes)


def test_a_function_is_a_partition_and_must_be_passed_again(tmp_path: Path) -> None:
    def even_and_odd(dataset: Dataset, seed: int) -> list[Any]:
        assert seed == 7
        return [np.arange(start, len(dataset), 2) for start in (0, 1)]

    settings = {**RUN, "models": "cnn5", "rounds": 1, "seed": 7}
    data = load_dataset("digits").only(torch.arange(60))
    polyfed.run("standalone", data=data, partition=even_and_odd, out=tmp_path / "run", **settings)
    with pytest.raises(InputError, match=r"polyfed.resume\(run, partition=…\)"):
        polyfed.resume(tmp_path / "run", data=data, rounds=2)
    with pytest.raises(InputError, match="the partition is .* but the run"):
        other = lambda dataset, seed: [np.arange(30), np.arange(30, 60)]  # noqa: E731
        polyfed.resume(tmp_path / "run", data=data, partition=other, rounds=2)
    again = polyfed.resume(tmp_path / "run", data=data, partition=even_and_odd, rounds=2, progress=False)
    assert again.population.data[1].train[0] % 2 == 1


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([], "is empty"),
        ([[0, 1], []], "gives client 1 no samples: give a list"),
        ([[0, 1], [1, 2]], "client 1 a sample that is given twice"),
        ([[0, 0]], "given twice"),
        ([[0, 99]], "the sample 99, but .* 0 to 15"),
        ([["a"]], "gives client 0 a"),
        ({"a": 1}, "gives client 0 a"),
    ],
)
def test_lists_are_checked(lists: Any, words: str) -> None:
    x, y, _ = arrays([16])
    with pytest.raises(InputError, match=words):
        polyfed.run("standalone", data=(x, y), partition=lists, **RUN)


def test_an_archive_per_client(tmp_path: Path) -> None:
    x, y, _ = arrays([24])
    for number, names in ((2, ["dog", "cat"]), (10, ["cat", "owl"])):
        rows = slice(0, 12) if number == 2 else slice(12, 24)
        np.savez(tmp_path / f"client-{number}.npz", x=x[rows], y=y[rows] % 2, class_names=np.array(names))
    dataset = load_dataset(f"npz:{tmp_path}")
    assert dataset.client_names == ("2", "10") and dataset.class_names == ("cat", "dog", "owl")
    assert dataset.labels.tolist() == [1, 0] * 6 + [0, 2] * 6
    with pytest.raises(InputError, match="without client"):
        (tmp_path / "empty").mkdir()
        load_dataset(f"npz:{tmp_path / 'empty'}")


def test_saved_data_still_say_whose_they_are(tmp_path: Path) -> None:
    x, y, client = arrays([8, 8])
    dataset = from_arrays(x, y, x[:2], y[:2], client=client, client_test=["p1", "p1"])
    save_npz(dataset, tmp_path / "saved.npz")
    again = load_dataset(f"npz:{tmp_path / 'saved.npz'}")
    assert again.owners is not None and dataset.owners is not None
    assert again.owners.tolist() == dataset.owners.tolist() and again.client_names == dataset.client_names


def draw(path: Path, colour: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), colour).save(path)


def test_folders_of_clients(tmp_path: Path) -> None:
    draw(tmp_path / "anna" / "train" / "cat" / "1.png", 1)
    draw(tmp_path / "anna" / "test" / "cat" / "1.png", 2)
    draw(tmp_path / "ben" / "cat" / "1.png", 3)
    draw(tmp_path / "ben" / "dog" / "1.png", 4)
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.client_names == ("anna", "ben") and dataset.class_names == ("cat", "dog")
    assert dataset.images[:, 0, 0, 0].tolist() == [1, 3, 4, 2] and dataset.official_test == 1
    assert dataset.owners is not None and dataset.owners.tolist() == [0, 1, 1, 0]
    draw(tmp_path / "ben" / "1.png", 4)
    with pytest.raises(InputError, match="anna holds the folder 'test'.*CLIENT/CLASS/PICTURE"):
        load_dataset(f"folder:{tmp_path}")


def test_a_column_of_a_table_names_the_client(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("v,site,y\n1,u,a\n2,w,b\n3,u,b\n4,w,a\n")
    dataset = load_dataset(f"table:{tmp_path / 't.csv'}", label="y", client="site")
    assert dataset.input_shape == (1,) and dataset.client_names == ("u", "w")
    assert dataset.owners is not None and dataset.owners.tolist() == [0, 1, 0, 1]
    with pytest.raises(InputError, match="client is 'place', but the columns"):
        load_dataset(f"table:{tmp_path / 't.csv'}", label="y", client="place")
    with pytest.raises(InputError, match="as the label and as the client"):
        load_dataset(f"table:{tmp_path / 't.csv'}", label="y", client="y")
