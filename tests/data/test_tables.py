"""Tables: numbers, categories and missing values become samples, with constants of training samples only."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import polyfed
from polyfed.assemble import data_facts
from polyfed.data import from_frame, load_dataset, save_constants
from polyfed.errors import InputError

CSV = """age;town;smokes;kind
1;Ulm;True;good
3;Bonn;False;bad
;Ulm;True;good
5;?;False;ugly
"""


def written(path: Path, text: str = CSV) -> Path:
    path.write_text(text)
    return path


def test_numbers_are_filled_and_standardised_and_categories_get_a_column_per_level(tmp_path: Path) -> None:
    """Ages 1, 3, –, 5 become 1, 3, 3, 5: mean 3, std √2. Towns are Bonn, Ulm; a missing one is 0 in both."""
    dataset = load_dataset(f"table:{written(tmp_path / 'people.csv')}", label="kind")
    assert (dataset.name, dataset.class_names) == ("people", ("bad", "good", "ugly"))
    assert dataset.labels.tolist() == [1, 0, 1, 2]
    root = 2**0.5
    wanted = [[-root, 1, 0, 1], [0, -1, 1, 0], [0, 1, 0, 1], [root, -1, 0, 0]]
    assert torch.allclose(dataset.images, torch.tensor(wanted)) and dataset.images.dtype == torch.float32


def test_constants_come_from_the_given_rows_only() -> None:
    """Rows 0 and 1 have the values 2 and 6 (mean 4, std 2, median 4) and only level a; row 3's b is then 0."""
    frame = pd.DataFrame({"v": [2.0, 6.0, None, 1000.0], "c": ["a", "a", "a", "b"], "y": [0, 1, 0, 1]})
    fitted = from_frame(frame, "y").fitted(torch.tensor([0, 1]))
    assert fitted.images.tolist() == [[-1, 1, 0], [1, 1, 0], [0, 1, 0], [498, 0, 0]]


def test_the_hash_of_a_table_is_of_its_rows_and_not_of_who_trains_on_them() -> None:
    frame = pd.DataFrame({"v": [1e9, 6.0, None, 1000.0], "c": ["a", "a", None, "b"], "y": [0, 1, 0, 1]})

    def hashed(frame: pd.DataFrame, *training: int) -> str:
        return data_facts(from_frame(frame, "y").fitted(torch.tensor(training)), [])["the data"]

    known = hashed(frame, 0, 1)
    assert hashed(frame, 2, 3) == known
    for column, row, value in (("v", 0, 1e9 + 1), ("v", 2, 4.0), ("c", 2, "a"), ("y", 0, 1)):
        changed = frame.copy()
        changed.loc[row, column] = value
        assert hashed(changed, 0, 1) != known
    constants = from_frame(frame, "y").table.constants
    scaled = from_frame(frame, "y", constants=constants)
    assert data_facts(scaled, [])["the data"] != known  # agreed constants are part of what is given


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_run_fits_to_the_training_samples_of_all_clients(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    frame = pd.DataFrame({"a": generator.normal(5, 3, 80), "b": generator.normal(size=80)})
    frame["kind"] = np.where(frame["a"] > 5, "high", "low")
    frame.to_csv(tmp_path / "t.csv")
    settings = {"clients": 2, "rounds": 1, "models": [Small], "device": "cpu", "progress": False}
    result = polyfed.run("fedproto", data=f"table:{tmp_path / 't.csv'}", label="kind", out=tmp_path / "run", **settings)
    people = result.population
    rows = torch.cat([own.train for own in people.data.values()])
    assert torch.allclose(people.dataset.images[rows].mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(people.dataset.images[rows].std(0, correction=0), torch.ones(2), atol=1e-5)
    assert not torch.allclose(people.dataset.images.mean(0), torch.zeros(2), atol=1e-5)
    again = polyfed.resume(tmp_path / "run", models=[Small], rounds=2, progress=False)
    assert again.summary["rounds"] == 2 and again.folder.config.label == "kind"


def test_agreed_constants_are_used_as_they_are(tmp_path: Path) -> None:
    whole, one = written(tmp_path / "all.csv"), tmp_path / "one.csv"
    dataset = load_dataset(f"table:{whole}?label=kind")
    save_constants(dataset, tmp_path / "agreed.json")
    one.write_text("smokes,kind,town,age\nFalse,ugly,Rome,3\nTrue,bad,Ulm,5\n")
    site = load_dataset(f"table:{one}?constants={tmp_path / 'agreed.json'}")
    assert site.class_names == dataset.class_names and site.labels.tolist() == [2, 0]
    assert torch.allclose(site.images, torch.tensor([[0, -1, 0, 0], [2**0.5, 1, 0, 1]]))
    assert torch.equal(site.fitted(torch.tensor([0])).images, site.images)
    one.write_text("smokes,kind,town,age\nFalse,new,Rome,3\nTrue,bad,Ulm,5\n")
    with pytest.raises(InputError, match="class 'new', but the agreed constants only know bad, good, ugly"):
        load_dataset(f"table:{one}?constants={tmp_path / 'agreed.json'}")
    (tmp_path / "agreed.json").write_text("{}")
    with pytest.raises(InputError, match="holds no constants"):
        load_dataset(f"table:{one}?constants={tmp_path / 'agreed.json'}")
    with pytest.raises(InputError, match="No such file.*: give the file that save_constants wrote"):
        load_dataset(f"table:{one}?constants={tmp_path / 'lost.json'}")


def test_test_rows_are_kept_apart_and_never_fitted_to(tmp_path: Path) -> None:
    train, test = written(tmp_path / "a.csv", "v,y\n2,0\n6,1\n"), written(tmp_path / "b.csv", "y,v\n1,100\n")
    dataset = load_dataset(f"table:{train}?label=y&test={test}")
    assert dataset.official_test == 1 and dataset.images.flatten().tolist() == [-1, 1, 48]
    assert dataset.class_names == ("0", "1")


def test_row_numbers_that_pandas_wrote_are_no_feature(tmp_path: Path) -> None:
    pd.DataFrame({"v": [1.0, 2.0], "y": ["a", "b"]}).to_csv(tmp_path / "t.csv")
    assert load_dataset(f"table:{tmp_path / 't.csv'}?label=y").input_shape == (1,)


def test_whole_floats_are_classes_in_ascending_order() -> None:
    dataset = from_frame(pd.DataFrame({"v": [1.0, 2.0, 3.0], "y": [10.0, 9.0, 10.0]}), "y")
    assert dataset.class_names == ("9", "10") and dataset.labels.tolist() == [1, 0, 1]


def test_columns_may_have_numbers_or_pairs_as_names() -> None:
    frame = pd.DataFrame({0: [1.0, 2.0] * 8, 1: ["a", "b"] * 8, 2: ["n"] * 8 + ["s"] * 8})
    result = polyfed.run("standalone", data=frame, label=1, client=2, rounds=1)
    assert result.population.dataset.class_names == ("a", "b")
    frame.columns = pd.MultiIndex.from_tuples([("v", "w"), ("v", "y"), ("v", "z")])
    with pytest.raises(InputError, match="label is 'y', but the columns of 'table' are v w, v y, v z"):
        from_frame(frame, "y")
    assert from_frame(frame, "v y", client="v z").input_shape == (1,)


def test_a_users_frame_is_not_changed() -> None:
    frame = pd.DataFrame({0: [1.0, 2.0], "y": ["a", "b"]})
    from_frame(frame, "y")
    assert list(frame.columns) == [0, "y"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["1,5", "2", "-3,25", None], "numbers with commas, such as '-3,25': write them with points"),
        (
            [*map(str, range(30)), "unknown"],
            "30 different numbers, but also texts such as 'unknown': leave fields empty",
        ),
        (["2021-03-01", "2021-12-24 10:30", None], "dates, such as '2021-03-01': make numbers of them"),
        (["24.12.2021", "1.3.21"], "dates, such as '1.3.21': make numbers of them"),
    ],
)
def test_numbers_do_not_become_categories(values: list[str | None], words: str) -> None:
    frame = pd.DataFrame({"age": values, "y": ["a", "b"] * (len(values) // 2) + ["a"] * (len(values) % 2)})
    with pytest.raises(InputError, match=f"column 'age' of 'table' has {words}"):
        from_frame(frame, "y")
    chosen = from_frame(frame.assign(age=frame["age"].astype("category")), "y")
    assert chosen.input_shape == (frame["age"].nunique(),)


def test_codes_are_categories() -> None:
    assert from_frame(pd.DataFrame({"ward": ["1", "2", "3b"], "y": ["a", "b", "a"]}), "y").input_shape == (3,)


def test_codes_are_the_same_categories_in_files_where_all_look_like_numbers(tmp_path: Path) -> None:
    """With a field empty, pandas reads 1 and 02 as 1.0 and 2.0."""
    whole = written(tmp_path / "all.csv", "grade,y\n1,a\n02,b\nX,a\n")
    part = written(tmp_path / "part.csv", "grade,y\n02,a\n,b\n1,b\n")
    dataset = load_dataset(f"table:{whole}?label=y&test={part}")
    assert dataset.images.tolist()[3:] == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]  # '02' comes before '1'
    save_constants(load_dataset(f"table:{whole}?label=y"), tmp_path / "agreed.json")
    site = load_dataset(f"table:{part}?constants={tmp_path / 'agreed.json'}")
    assert site.images.tolist() == dataset.images.tolist()[3:]
    switched = load_dataset(f"table:{part}?label=y&test={whole}")
    assert switched.images.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]]
    frames = pd.DataFrame({"grade": ["2", "1", "X"], "y": [0, 1, 0]}), pd.DataFrame({"grade": [1, None], "y": [0, 1]})
    joined = from_frame(frames[0], "y", frames[1])
    assert joined.images.tolist()[3:] == [[1, 0, 0], [0, 0, 0]]


def test_truths_stay_numbers_where_one_is_missing(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "smokes,y\ntrue,a\nfalse,b\n,a\ntrue,b\n")
    dataset = load_dataset(f"table:{path}?label=y")
    assert dataset.images[:, 0].tolist() == [dataset.images[0, 0].item() * each for each in (1, -3, 1, 1)]
    save_constants(dataset, tmp_path / "agreed.json")
    again = load_dataset(f"table:{path}?constants={tmp_path / 'agreed.json'}")
    assert torch.equal(again.images, dataset.images)


ROWS = 202


@pytest.mark.parametrize(
    ("columns", "label", "words"),
    [
        ({"v": [1.0], "y": ["a"]}, None, "--label COLUMN of v, y"),
        ({"v": [1.0], "y": ["a"]}, "z", "label is 'z', but the columns of 'table' are v, y"),
        ({"v": [1.0, 2.0], "y": ["a", None]}, "y", "missing in 1 row.*first at 1"),
        ({"v": [1.0, 2.0], "y": [0.5, 1.0]}, "y", "0.5 at row 0, but polyfed classifies"),
        ({"v": [1.0] * ROWS, "y": range(ROWS)}, "y", f"{ROWS} different values in {ROWS} rows, but polyfed classifies"),
        ({"v": [1.0, 2.0], "y": ["a", "a"]}, "y", "a single value"),
        ({"v": ["x"] * ROWS, "y": [0, 1] * (ROWS // 2), "id": [f"p{n}" for n in range(ROWS)]}, "y", "drop=id"),
        ({"v": [np.inf, 2.0], "y": ["a", "b"]}, "y", "column 'v' .* infinite"),
        ({"v": [1 + 2j, 2.0], "y": ["a", "b"]}, "y", "column 'v' has complex"),
        ({"v": ["2020/01/02", "2020/01/03"], "y": ["a", "b"]}, "y", "column 'v' .* dates, such as '2020/01/02'"),
        ({"v": [None, None], "y": ["a", "b"]}, "y", "column 'v' .* is empty"),
        ({"v": pd.to_datetime(["2020-01-01", "2020-01-02"]), "y": ["a", "b"]}, "y", "column 'v' .* dates"),
        ({"y": ["a", "b"]}, "y", "no column besides its label"),
        ({"v": [], "y": []}, "y", "no rows"),
    ],
)
def test_tables_that_cannot_be_used(columns: dict[str, object], label: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_frame(pd.DataFrame(columns), label)


@pytest.mark.parametrize("kind", ["object", "string"])
def test_rows_of_nobody_are_refused(kind: str) -> None:
    frame = pd.DataFrame({"v": [1.0, 2.0, 3.0], "ward": ["n", None, "s"], "y": ["a", "b", "a"]}).astype({"ward": kind})
    with pytest.raises(InputError, match="the client 'ward' of 'table' is missing in 1 row, the first at 1: fill"):
        from_frame(frame, "y", client="ward")


def test_columns_can_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv")
    assert load_dataset(f"table:{path}?label=kind&drop=town,smokes").input_shape == (1,)
    with pytest.raises(InputError, match="drop is 'x'"):
        load_dataset(f"table:{path}?label=kind&drop=x")
    with pytest.raises(InputError, match="label is 'age', but the data .* say 'kind'"):
        load_dataset(f"table:{path}?label=kind", label="age")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no file"):
        load_dataset(f"table:{tmp_path / 'no.csv'}", label="y")
    with pytest.raises(InputError, match="cannot be read as a table"):
        load_dataset(f"table:{written(tmp_path / 'e.csv', '')}", label="y")
    for encoding in ("latin-1", "utf-16"):
        (tmp_path / "e.csv").write_text("v,y\n1,ä\n2,b\n", encoding=encoding)
        with pytest.raises(InputError, match="not written in UTF-8: save it again as CSV in UTF-8"):
            load_dataset(f"table:{tmp_path / 'e.csv'}", label="y")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "fastparquet", None)
    with pytest.raises(InputError, match="install pyarrow"):
        load_dataset(f"table:{written(tmp_path / 't.parquet', '')}", label="y")


def test_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pd.DataFrame({"v": [2.0, 6.0], "y": ["a", "b"]}).to_parquet(tmp_path / "t.parquet")
    assert load_dataset(f"table:{tmp_path / 't.parquet'}", label="y").images.flatten().tolist() == [-1, 1]
