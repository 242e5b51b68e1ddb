"""Members from site.yaml files: their samples with the agreed classes, their networks, and a simulation's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from polyfed.deploy.member import Member, read_member, simulated
from polyfed.engines import SequentialEngine
from polyfed.errors import InputError
from polyfed.message import Message
from polyfed.records import RunFolder
from polyfed.remote import InMemoryTransport, RemoteEngine
from polyfed.server.federation import Federation
from tests import support
from tests.deploy.files import OWN_NETWORK, write_member, write_terms
from tests.remote.support import same_rows

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "amber": {"classes": (0, 1), "network": "tests.support:Wide"},
    "birch": {"classes": (1, 3), "start": 1, "network": "birch_nets:Mine"},
    "cedar": {"classes": (2,), "start": 2, "network": "tests.support:Normed", "split": "1:1:1"},
}


def members(folder: Path, *, own_networks: bool = True, **terms: Any) -> list[Member]:
    """Three sites with different networks (one its own, one with batch norm and dropout), classes and splits."""
    write_terms(folder, **terms)
    changes = {} if own_networks else {"network": None}
    paths = {name: write_member(folder / name, name, **{**own, **changes}) for name, own in SETTINGS.items()}
    (folder / "birch" / "birch_nets.py").write_text(OWN_NETWORK)
    return [read_member(path, trust=True) for path in paths.values()]


def one(folder: Path, *, terms: Mapping[str, Any] | None = None, **changes: Any) -> Member:
    write_terms(folder, **(terms or {}))
    return read_member(write_member(folder / "amber", **{"name": "amber", **changes}), trust=True)


@pytest.mark.parametrize("method", ["fedproto", "fml", "dc-pfl", "fedssa"])
def test_a_federation_of_sites_has_the_numbers_of_its_simulation(tmp_path: Path, method: str) -> None:
    """Every row and every site's final state, bit by bit: batch norm, dropout and a site's own class included."""
    people = members(tmp_path, method=method, rounds=3, participation=0.7)
    terms = people[0].terms
    clients = simulated(people)
    engine = SequentialEngine(clients)
    config = terms.experiment()
    Federation(config, clients.method, engine, RunFolder.create(tmp_path / "one", config)).run()
    sites = {member.name: member.site() for member in members(tmp_path, method=method, rounds=3, participation=0.7)}
    transport = InMemoryTransport({name: site.answer for name, site in sites.items()})
    apart = RunFolder.create(tmp_path / "two", config)
    common = terms.method()
    Federation(config, common, RemoteEngine(terms.agreement(), transport, common), apart).run()
    same_rows(tmp_path / "one", tmp_path / "two")
    for member in people:
        sites[member.name].export(tmp_path / "own.safetensors")
        own, expected = load_file(tmp_path / "own.safetensors"), engine.get_state(member.number)
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[key], expected[key]) for key in own), member.name


def test_a_member_hears_what_its_few_samples_are_not_enough_for(tmp_path: Path) -> None:
    """Of its 10 samples of one class six are for training; with both classes they are twelve."""
    few = one(tmp_path, terms={"method": "fedapen"}, classes=(0,)).population()
    assert [note for note in few.notes if "too few" in note] == [
        "client 0: too few training samples to set one aside (mixing_samples), so the mixing weight stays at one half"
    ]
    enough = one(tmp_path, terms={"method": "fedapen"}, classes=(0, 1)).population()
    assert not [note for note in enough.notes if "too few" in note]


def test_a_simulation_of_members_keeps_each_ones_samples_and_split(tmp_path: Path) -> None:
    """30 samples of each class, every third of two classes: 20 each; 10 of one class for cedar, split evenly."""
    people = members(tmp_path)
    clients = simulated(list(reversed(people)))
    assert clients.clients == [0, 1, 2]
    assert [len(clients.data[number]) for number in range(3)] == [20, 20, 10]
    for member in people:
        own, together = member.data, clients.data[member.number]
        for mine, theirs in zip(own.parts, together.parts, strict=True):
            assert torch.equal(member.dataset.images[mine], clients.dataset.images[theirs])
            assert torch.equal(member.dataset.labels[mine], clients.dataset.labels[theirs])
    assert [len(part) for part in clients.data[2].parts] == [3, 3, 4]


def test_a_simulation_needs_every_member_with_the_same_terms(tmp_path: Path) -> None:
    people = members(tmp_path / "one")
    with pytest.raises(InputError, match=r"every member once \(amber, birch, cedar\), but was given amber, birch"):
        simulated(people[:2])
    other = one(tmp_path / "two", terms={"seed": 4})
    with pytest.raises(InputError, match="'amber' and 'amber' have different terms: seed is 0 here and 4"):
        simulated([people[0], other])


def npz(path: Path, labels: list[int], names: list[str] | None = None, **shape: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.zeros((len(labels), *shape.get("shape", (1, 6, 6))), shape.get("dtype", np.uint8))
    x[:, 0] = np.arange(len(labels), dtype=x.dtype)[:, None, None]
    named = {} if names is None else {"class_names": np.array(names)}
    np.savez(path, x=x, y=np.array(labels), **named)


def test_names_of_classes_decide_their_numbers(tmp_path: Path) -> None:
    """This site knows d and b, in its own order; the federation agreed on a, b, c, d."""
    npz(tmp_path / "amber" / "named.npz", [0, 0, 1, 1, 1], ["d", "b"])
    found = one(tmp_path, data="npz:named.npz").dataset
    assert found.labels.tolist() == [3, 3, 1, 1, 1]
    assert (found.classes, found.class_names) == (4, ("a", "b", "c", "d"))


def test_integer_labels_stay_even_if_some_classes_do_not_occur(tmp_path: Path) -> None:
    npz(tmp_path / "amber" / "some.npz", [3, 1, 3])
    assert one(tmp_path, data="npz:some.npz").dataset.labels.tolist() == [3, 1, 3]


def test_an_archive_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    (tmp_path / "amber").mkdir()
    x, y = np.zeros((2, 6, 6), np.uint8), np.array([0, 1])
    np.savez(tmp_path / "amber" / "more.npz", x=x, y=y, client=y)
    with pytest.raises(InputError, match="more.npz also holds an array 'client', which a site does not use"):
        _ = one(tmp_path, data="npz:more.npz").dataset
    np.savez(tmp_path / "amber" / "less.npz", x=x)
    with pytest.raises(InputError, match="less.npz lacks y"):
        _ = one(tmp_path, data="npz:less.npz").dataset


def test_a_test_set_of_its_own_is_only_tested_on(tmp_path: Path) -> None:
    (tmp_path / "amber").mkdir()
    x, y = np.zeros((8, 6, 6), np.uint8), np.array([3, 1] * 4)
    np.savez(tmp_path / "amber" / "two.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    member = one(tmp_path, data="npz:two.npz", split="1:1")
    assert sorted(member.data.test.tolist()) == [8, 9, 10, 11] and len(member.data.train) == 8
    assert member.population().test_set == "apart"


def test_pixels_are_normalised_with_the_agreed_mean_and_std(tmp_path: Path) -> None:
    """Sample 2 is all 2: (2 / 255 - 0.5) / 0.25."""
    npz(tmp_path / "amber" / "some.npz", [3, 1, 3])
    x, _ = one(tmp_path, data="npz:some.npz").dataset.batch(torch.tensor([2]))
    torch.testing.assert_close(x, torch.full_like(x, (2 / 255 - 0.5) / 0.25))


@pytest.mark.parametrize(
    ("labels", "names", "form", "words"),
    [
        ([0, 1], ["a", "x"], {}, r"'own' has the class 'x', which is not one that the federation agreed on \(a, b, c"),
        ([0, 4], None, {}, "labels from 0 to 4 for 4 classes"),
        ([0, 1], None, {"shape": (3, 6, 6)}, r"'own' have shape \[3, 6, 6\], but the federation agreed on \[1, 6, 6\]"),
        ([0, 1], None, {"dtype": np.float32}, "'own' are floats, but the federation agreed on pixels"),
    ],
)
def test_samples_that_are_not_as_agreed_are_refused(
    tmp_path: Path, labels: list[int], names: list[str] | None, form: dict[str, Any], words: str
) -> None:
    member = one(tmp_path)
    npz(tmp_path / "amber" / "own.npz", labels, names, **form)
    with pytest.raises(InputError, match=words):
        _ = member.dataset


def test_float_data_are_agreed_on_by_leaving_mean_and_std_out(tmp_path: Path) -> None:
    float_terms = {"task": {"mean": [], "std": []}}
    with pytest.raises(InputError, match=r"'own' are pixels \(uint8\), but the federation agreed on float data"):
        _ = one(tmp_path, terms=float_terms).dataset
    npz(tmp_path / "amber" / "floats.npz", [0, 3], dtype=np.float32)
    found = one(tmp_path, terms=float_terms, data="npz:floats.npz").dataset
    assert found.images.dtype == torch.float32 and found.mean == ()


def test_a_site_with_token_ids_trains_if_its_vocabulary_is_the_agreed_one(tmp_path: Path) -> None:
    task = {"input_shape": [9], "mean": [], "std": [], "vocabulary": 20, "padding": 0, "features": 128}
    member = one(tmp_path, terms={"task": task}, data="tests.kinds:texts", network="text_gru")
    engine = SequentialEngine(member.population())
    (reply,) = engine.train(1, {0: Message()})
    assert reply.failure == "" and reply.loss > 0
    with pytest.raises(InputError, match="have the vocabulary 20 and the padding 0, but the federation agreed on 21"):
        _ = one(tmp_path, terms={"task": {**task, "vocabulary": 21}}, data="tests.kinds:texts").dataset


@pytest.mark.parametrize("function", ["arrays", "dataset", "pairs", "listed"])
def test_data_from_a_function_beside_the_file(tmp_path: Path, function: str) -> None:
    """Arrays, a Dataset and pairs have integer labels; a torch dataset that lists classes has names."""
    (tmp_path / "amber").mkdir()
    (tmp_path / "amber" / f"own_{function}.py").write_text(
        "import numpy as np, torch, polyfed\n"
        "x, y = np.zeros((6, 6, 6), np.uint8), np.array([3, 3, 1, 1, 1, 3])\n"
        "def arrays(): return x, y\n"
        "def dataset(): return polyfed.from_arrays(x, y, classes=4)\n"
        "def pairs(): return [(image, int(label)) for image, label in zip(x, y)]\n"
        "class Listed(torch.utils.data.Dataset):\n"
        "    classes = ['d', 'c']\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, i): return x[i], int(y[i] == 1)\n"
        "def listed(): return Listed()\n"
    )
    found = one(tmp_path, data=f"own_{function}:{function}").dataset
    assert found.labels.tolist() == ([3, 3, 2, 2, 2, 3] if function == "listed" else [3, 3, 1, 1, 1, 3])
    assert found.mean == (0.5,)


def test_a_site_is_one_client(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of 'motion' are those of 12 clients, but a site is one client"):
        _ = one(tmp_path, data="motion").dataset


def test_a_function_that_fails_or_gives_something_else(tmp_path: Path) -> None:
    (tmp_path / "amber").mkdir()
    (tmp_path / "amber" / "own_bad.py").write_text("def none(): return 3\ndef fails(): raise KeyError('ward 7')\n")
    with pytest.raises(InputError, match="own_bad:none gives a value of type int, which holds no samples with labels"):
        _ = one(tmp_path, data="own_bad:none").dataset
    with pytest.raises(InputError, match=r"own_bad:fails\(\) fails: 'ward 7' \(.*own_bad.py, line 2\)"):
        _ = one(tmp_path, data="own_bad:fails").dataset


def test_a_module_of_another_site_with_the_same_name_is_not_mistaken_for_ones_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "amber").mkdir(parents=True)
        (tmp_path / name / "amber" / "same_name.py").write_text(OWN_NETWORK)
    _ = one(tmp_path / "one", network="same_name:Mine").architecture
    with pytest.raises(InputError, match="'same_name:Mine' would be that of .*one.* give that module another name"):
        _ = one(tmp_path / "two", network="same_name:Mine").architecture


def pictures(folder: Path, *names: str, size: tuple[int, int] = (6, 6), mode: str = "L") -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(4):
            Image.new(mode, size, 9 * number).save(folder / name / f"{number}.png")


def test_a_folder_with_some_of_the_classes_gets_the_agreed_numbers_and_size(tmp_path: Path) -> None:
    """Its own numbers would be 0 for b and 1 for d; pictures of another size and in colour are brought to 1×6×6."""
    pictures(tmp_path / "amber" / "images", "b", "d", size=(9, 12), mode="RGB")
    found = one(tmp_path, data="folder:images").dataset
    assert found.labels.tolist() == [1] * 4 + [3] * 4
    assert found.input_shape == (1, 6, 6) and found.mean == (0.5,)
    pictures(tmp_path / "amber" / "images", "e")
    with pytest.raises(InputError, match="'images' has the class 'e', which is not one that the federation agreed"):
        _ = one(tmp_path, data="folder:images").dataset


def test_a_folder_with_a_single_class_will_do(tmp_path: Path) -> None:
    """Other members have the others."""
    pictures(tmp_path / "amber" / "images", "c")
    assert one(tmp_path, data="folder:images").dataset.labels.tolist() == [2] * 4


def test_folders_without_agreed_names_need_numbers_as_names(tmp_path: Path) -> None:
    terms = {"task": {"classes": 4}}
    pictures(tmp_path / "amber" / "images", "3", "1")
    assert one(tmp_path, terms=terms, data="folder:images").dataset.labels.tolist() == [1] * 4 + [3] * 4
    pictures(tmp_path / "amber" / "named", "b", "d")
    with pytest.raises(InputError, match="has the class 'b', .* agree on the classes' names"):
        _ = one(tmp_path, terms=terms, data="folder:named").dataset


TABLE = {"mean": [], "std": [], "input_shape": [3], "constants": "constants.json"}


def with_table(tmp_path: Path, rows: str, data: str = "table:own.csv", **settings: Any) -> Member:
    """A member with these rows, in a federation on tables."""
    constants = {
        "label": "ill",
        "classes": ["a", "b", "c", "d"],
        "numbers": [{"column": "age", "fill": 40, "mean": 40, "std": 10}],
        "categories": [{"column": "sex", "levels": ["f", "m"]}],
    }
    (tmp_path / "amber").mkdir()
    (tmp_path / "constants.json").write_text(json.dumps(constants))
    (tmp_path / "amber" / "own.csv").write_text(rows)
    return one(tmp_path, terms={"task": TABLE}, data=data, **settings)


def test_tables_need_agreed_constants_and_get_the_agreed_numbers(tmp_path: Path) -> None:
    """Age 50 is (50 - 40) / 10 = 1 by the agreed constants, whatever the mean of this site's rows is."""
    found = with_table(tmp_path, "age,sex,ill\n50,m,d\n,f,b\n20,m,d\n", label="ill")
    assert found.dataset.images.tolist() == [[1, 0, 1], [0, 1, 0], [-2, 0, 1]]
    assert found.dataset.labels.tolist() == [3, 1, 3]
    assert found.terms.plain()["task"]["constants"]["numbers"][0]["mean"] == 40
    with pytest.raises(InputError, match=r"input_shape is \[4\], but the columns in task.constants become 3 numbers"):
        one(tmp_path, terms={"task": {**TABLE, "input_shape": [4]}}, data="table:own.csv")
    with pytest.raises(InputError, match="agrees on how columns become numbers: name the file .*task.constants"):
        _ = one(tmp_path, terms={"task": {**TABLE, "constants": None}}, data="table:own.csv", label="ill").dataset


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("age,sex,ill\n50,male,d\n,female,b\n", "column 'sex' .* none of the texts .* name there .f, m., but 'female'"),
        ("age;sex;ill\n5,5;m;d\n2;f;b\n", "column 'age' .* has numbers with commas, such as '5,5': write them with"),
    ],
)
def test_columns_that_are_not_written_as_agreed_are_refused(tmp_path: Path, rows: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        _ = with_table(tmp_path, rows).dataset


def test_a_table_with_a_single_class_will_do(tmp_path: Path) -> None:
    assert with_table(tmp_path, "age,sex,ill\n50,m,d\n,,d\n").dataset.labels.tolist() == [3, 3]


def test_a_function_may_give_a_frame(tmp_path: Path) -> None:
    member = with_table(tmp_path, "age,sex,ill\n50,m,d\n,f,b\n20,m,d\n", data="own_frame:rows")
    (tmp_path / "amber" / "own_frame.py").write_text(
        "from pathlib import Path\nimport pandas\n"
        "def rows(): return pandas.read_csv(Path(__file__).with_name('own.csv'))\n"
    )
    assert member.dataset.images.tolist() == [[1, 0, 1], [0, 1, 0], [-2, 0, 1]]
    assert member.dataset.labels.tolist() == [3, 1, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "dune"}, "name is 'dune', which is not a member in '.*federation.yaml'; members are amber, birch"),
        ({"server": "fl.example.org"}, "server is 'fl.example.org', but must be HOST:PORT"),
        ({"share": "all"}, "share is 'all', but must be one of scores, nothing"),
        ({"dat": "x"}, "unknown setting 'dat': did you mean 'data'"),
        ({"data": None}, "data is missing"),
        ({"federation": "gone.yaml"}, "can't read the federation '.*gone.yaml'"),
        ({"network": None}, "network is missing: name one, such as cnn2"),
        ({"network": "papers"}, "network is 'papers', which stands for 5 networks: name one"),
        ({"network": "cnn2", "head": "fc"}, "head is 'fc', but the head of cnn2 is known: leave it out"),
        ({"label": "kind"}, "label is 'kind', but the data 'npz:own.npz' have no columns"),
        ({"split": "8"}, "split '8' is not a ratio"),
        ({"device": "abacus"}, "device is 'abacus', which this machine does not have"),
    ],
)
def test_what_a_site_can_not_be_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        one(tmp_path, **changes).population()


def test_a_site_with_one_sample_has_nothing_to_test_on(tmp_path: Path) -> None:
    member = one(tmp_path)
    npz(tmp_path / "amber" / "own.npz", [1])
    with pytest.raises(InputError, match=r"'own' has 1 sample, too few for the test part of split 6:2:2"):
        _ = member.data


def test_networks_are_brought_to_the_agreed_features(tmp_path: Path) -> None:
    people = one(tmp_path, terms={"task": {"features": 3}}).population()
    assert people.profile(0).features == 3


class NoBias(support.Wide):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.out = torch.nn.Linear(support.FEATURES, classes, bias=False)


def test_a_head_unlike_the_common_one_is_refused_where_heads_are_shared(tmp_path: Path) -> None:
    """The server builds a linear layer with a bias, whatever all sites have."""
    network = "tests.deploy.test_member:NoBias"
    with pytest.raises(InputError, match="dc-pfl needs the same head in every site, weight .4, 6. and bias .4,., but"):
        one(tmp_path, terms={"method": "dc-pfl"}, network=network).population()
    one(tmp_path, network=network).population()  # fedproto shares no head


def test_the_common_network_of_fedavg_may_be_left_out_but_not_replaced(tmp_path: Path) -> None:
    terms = {"method": "fedavg", "task": {"network": "tests.support:Wide", "features": None}}
    assert one(tmp_path, terms=terms, network=None).population().architectures[0].name == "tests.support:Wide"
    one(tmp_path, terms=terms)
    with pytest.raises(InputError, match="network is 'tests.support:Narrow', but the federation agreed on tests.supp"):
        one(tmp_path, terms=terms, network="tests.support:Narrow").population()


def test_code_that_only_the_terms_name_needs_trust_but_a_sites_own_does_not(tmp_path: Path) -> None:
    write_terms(tmp_path, task={"auxiliary": None})
    path = write_member(tmp_path / "amber", "amber")
    read_member(path).population()
    write_terms(tmp_path)
    with pytest.raises(InputError, match="names code that would be run, 'tests.support:Narrow'"):
        read_member(path)


def test_paths_begin_where_the_file_is(tmp_path: Path) -> None:
    member = one(tmp_path)
    assert member.settings.folder == tmp_path / "amber" / "state"
    assert member.key == tmp_path / "amber" / "amber.key"
    assert one(tmp_path, key="/run/k").key == Path("/run/k")
