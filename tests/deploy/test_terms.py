"""Terms of a federation: what is refused and in which words, what members agree on, what a server can build."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.deploy.terms import Terms, read_terms, terms_of
from polyfed.errors import InputError
from polyfed.methods.base import Server
from polyfed.remote.agreement import Agreement
from polyfed.shapes import TokenShape
from tests.deploy.files import NAMES, public_key, terms, write_terms


def made(**changes: Any) -> Terms:
    return terms_of(terms(**changes), trust=True)


@pytest.mark.parametrize("name", polyfed.METHODS)
def test_a_server_without_any_members_network_can_construct_every_method(name: str) -> None:
    """Start, download and schema work; so the server can run before it knows a single network."""
    own = {"network": "tests.support:Wide"} if "network" in polyfed.METHODS[name].requires else {}
    method = made(method=name, task=own).method()
    server = Server(seed=0, round=1)
    method.start(server)
    method.download(server, 0, torch.tensor([1, 2]) if method.announces_classes else None)
    assert method.agreed_schema is method.agreed_schema


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": None}, "name is missing: give a name of at most 64 letters"),
        ({"name": "a/b"}, "name is 'a/b', but must be a name of at most 64 letters"),
        ({"method": "fedprot"}, "unknown method 'fedprot': did you mean 'fedproto'"),
        ({"training": {"lr": -1}}, "training.lr is -1, but must be a number greater than 0"),
        ({"round": 3}, "unknown setting 'round': did you mean 'rounds'"),
        ({"devices": "uniform"}, "devices is for simulations only: leave it out"),
        ({"deadline": 3}, "deadline is for simulations only"),
        ({"clients": 3}, "clients is for simulations only"),
        ({"engine": "ray"}, "engine is for simulations only"),
        ({"ray": {"hosts": 2}}, "ray is for simulations only"),
        ({"data": "npz:x"}, r"data belongs to every site's own file \(site.yaml\)"),
        ({"network": "cnn1"}, r"network belongs to every site's own file \(site.yaml\)"),
        ({"split": "8:2"}, r"split belongs to every site's own file"),
        ({"features": 8}, "features belongs in the group task: write it as task.features"),
        ({"grace": 8}, "grace belongs in the group server"),
        ({"device": "cpu"}, "device belongs in the group server"),
        ({"members": None}, "members has 0 entries, but a federation needs at least 2"),
        ({"members": {"amber": public_key(1)}}, "members has 1 entry, but a federation needs at least 2"),
        ({"members": ["amber", "birch"]}, r"members is \['amber', 'birch'\], but must be names with values"),
        ({"members": {"amber": public_key(1), "birch": f"{public_key(1)} b@x"}}, "'amber' and 'birch' have the same"),
        ({"members": {"amber": public_key(1), "birch": None}}, "the public key of 'birch' is missing, but must be the"),
        ({"members": {"amber": public_key(1), "birch": "PUBLIC-KEY"}}, "public key of 'birch' is 'PUBLIC-KEY'"),
        ({"members": {"amber": public_key(1), "birch": public_key(2)[:-8]}}, "the public key of 'birch' is 'ecdsa"),
        ({"members": {"amber": public_key(1), "../birch": public_key(2)}}, "the name of a member is '../birch', but"),
        ({"task": None}, "task.classes is missing"),
        ({"task": {"classes": 1}}, "task.classes is 1, but there must be at least 2"),
        ({"task": {"classes": ["a", "a"]}}, "task.classes has 'a' twice"),
        ({"task": {"classes": [True, False]}}, r"task.classes is \[True, False\], but must be .* in quotes"),
        ({"task": {"input_shape": [1, 0, 6]}}, r"task.input_shape is \[1, 0, 6\], but its sizes must be at least 1"),
        ({"task": {"mean": [0.5, 0.5]}}, r"task.mean has 2 values, but images of shape \[1, 6, 6\] need 1"),
        ({"task": {"std": []}}, "task.std has 0 values, but images"),
        ({"task": {"std": [0.0]}}, r"task.std is \[0.0\], but every value must be above 0"),
        ({"task": {"input_shape": [5]}}, r"task.mean and task.std are for images .* is \[5\]: leave them out"),
        ({"task": {"padding": 0}}, "task.padding is for token ids: give task.vocabulary too"),
        ({"task": {"vocabulary": 9}}, r"for token ids, .* but task.input_shape is \[1, 6, 6\]"),
        (
            {"task": {"vocabulary": 9, "padding": 9, "input_shape": [5], "mean": [], "std": []}},
            "task.padding is 9, but must be one of the ids 0 to 8",
        ),
        ({"task": {"feature": 3}}, "unknown setting 'task.feature': did you mean 'features'"),
        ({"task": {"features": None}}, "fedproto needs the same number of features in every network: set task.feat"),
        ({"method": "fedgen", "task": {"features": None}}, "fedgen needs the same head .* set task.features"),
        ({"method": "fedavg"}, "fedavg needs the same network in every site: name it in task.network"),
        ({"task": {"network": "cnn1"}}, "task.network is 'cnn1', but fedproto lets every site have its own"),
        ({"method": "fml", "task": {"auxiliary": None}}, "fml trains a small common network .* task.auxiliary"),
        ({"method": "fml", "task": {"auxiliary": "papers"}}, "task.auxiliary is 'papers', which stands for 5 networks"),
        ({"method": "fml", "task": {"auxiliary": "cnn5"}}, "cnn5"),  # too small images for it
        ({"method": "fedmrl", "task": {"features": None}}, "fedmrl needs to know .* method.shared_features"),
        ({"min_replies": 4}, "min_replies is 4, but must be at most 3"),
        ({"server": {"enough_replies": 4}}, "enough_replies is 4, but must be a whole number from 1 to 3"),
        ({"server": {"minimum_members": 4}}, "server.minimum_members is 4, but the federation has 3 members"),
        ({"server": {"listen": "9443"}}, "server.listen is '9443', but must be HOST:PORT"),
        ({"server": {"grace": -1}}, "server.grace is -1, but must be a number at least 0"),
        ({"server": {"port": 1}}, "unknown setting 'server.port'"),
        (
            {"method": {"name": "fedavg", "finetune_epochs": 1}, "evaluate": "after-download",
             "task": {"network": "tests.support:Wide"}},
            "evaluate is 'after-download', but",
        ),
    ],
)  # fmt: skip
def test_terms_that_can_not_work_are_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        made(**changes)
    assert "\n" not in str(error.value)


def test_fedmrl_needs_features_or_shared_features() -> None:
    made(method={"name": "fedmrl", "shared_features": 3}, task={"features": None})
    made(method="fedmrl")


def test_only_the_order_of_members_gives_their_numbers_and_a_comment_after_a_key_does_not_count() -> None:
    members = {"cedar": f"{public_key(7)} someone@host", "amber": public_key(8)}
    agreement = made(members=members).agreement()
    assert agreement.members == {"cedar": 0, "amber": 1}
    assert agreement.keys == {"cedar": public_key(7), "amber": public_key(8)}


def test_an_agreement_carries_the_servers_patience_and_the_task() -> None:
    found = made(server={"grace": 3, "reply_timeout": 60, "enough_replies": 2}).agreement()
    assert (found.patience.grace, found.patience.timeout, found.patience.enough) == (3, 60, 2)
    assert (found.run, found.classes, found.input_shape, found.mean, found.std) == (
        "trial-1", 4, (1, 6, 6), (0.5,), (0.25,)
    )  # fmt: skip


def test_token_ids_are_agreed_on_with_their_vocabulary() -> None:
    task = {"input_shape": [9], "mean": [], "std": [], "vocabulary": 20, "padding": 0, "auxiliary": None}
    found = made(task=task)
    shape = found.task().input_shape
    assert isinstance(shape, TokenShape)
    assert (shape, shape.vocabulary, shape.padding) == ((9,), 20, 0)
    agreement = found.agreement()
    assert (agreement.input_shape, agreement.vocabulary, agreement.padding) == ((9,), 20, 0)
    assert Agreement.from_dict(json.loads(json.dumps(agreement.to_dict()))) == agreement


def test_the_servers_experiment_has_as_many_clients_as_members_and_a_checkpoint_in_every_round() -> None:
    config = made(lr=0.3, training={"batch_size": 4}, server={"device": "cpu"}).experiment()
    assert (config.clients, config.checkpoint_every, config.confusion, config.device) == (3, 1, "none", "cpu")
    assert (config.data, config.models) == ("python:sites", "python:sites")
    assert (config.training.lr, config.training.batch_size) == (0.3, 4)


def test_plain_terms_survive_json_and_hold_nothing_of_the_servers_own() -> None:
    found = made(server={"listen": "10.1.2.3:444", "folder": "secret-folder"})
    text = json.dumps(found.plain())
    assert found.difference(json.loads(text)) is None
    assert "10.1.2.3" not in text and "secret-folder" not in text and "server" not in json.loads(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"batch_size": 8, "lr": 0.2}}, "training.lr is 0.1 here and 0.2 at the server"),
        ({"name": "trial-2"}, "name is trial-1 here and trial-2 at the server"),
        ({"method": "fedtgp"}, "method.name is fedproto here and fedtgp at the server"),
        ({"task": {"classes": ["a", "b", "d", "c"]}}, "task.classes is .'a', 'b', 'c', 'd'. here and .'a', 'b', 'd', "),
        ({"task": {"std": [0.5]}}, r"task.std is \[0.25\] here and \[0.5\] at the server"),
        ({"seed": 1}, "seed is 0 here and 1 at the server"),
        ({"members": {name: public_key(i + 5) for i, name in enumerate(NAMES)}}, "members.amber is ecdsa.*… here and"),
        (
            {"members": {name: public_key(NAMES.index(name)) for name in reversed(NAMES)}},
            "members are amber, birch, cedar here and cedar, birch, amber at the server",
        ),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], words: str) -> None:
    assert re.match(words, str(made().difference(made(**changes))))


def test_a_difference_in_the_servers_own_settings_is_none() -> None:
    assert made().difference(made(server={"grace": 1, "listen": "h:1", "device": "cpu"})) is None


@pytest.mark.parametrize("theirs", [{}, {"name": 3}, {"name": {"a": 1}}, {"extra": "x" * 10_000}])
def test_whatever_a_server_sends_gives_a_short_sentence(theirs: dict[str, Any]) -> None:
    said = made().difference({**made().plain(), **theirs} if theirs else {})
    assert said is not None and len(said) < 250


def test_relative_paths_begin_where_the_file_is(tmp_path: Path) -> None:
    found = read_terms(write_terms(tmp_path / "there", server={"key": "/etc/k"}), trust=True)
    assert found.server.certificate == tmp_path / "there" / "keys" / "server.crt"
    assert found.server.key == Path("/etc/k")


@pytest.mark.parametrize(
    "changes",
    [
        {},  # auxiliary
        {"task": {"auxiliary": None}, "method": {"name": "pfedes", "proxy": "tests.support:Wide"}},
        {"task": {"auxiliary": None}, "method": "tests.support:Wide"},
        {"task": {"auxiliary": None, "network": "tests.support:Wide"}, "method": "fedavg"},
    ],
)
def test_code_that_terms_name_is_not_imported_without_trust(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"names code that would be run, 'tests.support:\w+': if you trust it"):
        read_terms(write_terms(tmp_path, **changes))


def test_files_that_hold_no_terms(tmp_path: Path) -> None:
    path = tmp_path / "federation.yaml"
    with pytest.raises(InputError, match="federation '.*federation.yaml': No such file.*; its coordinator writes"):
        read_terms(path)
    path.write_text("- 3")
    with pytest.raises(InputError, match="is not a federation; it needs names and values"):
        read_terms(path)
    path.write_text("members:\n  a: x\n  a: y\n")
    with pytest.raises(InputError, match="gives 'a' twice, in lines 2 and 3"):
        read_terms(path)


def test_fedl2g_needs_equal_features_only_if_its_vectors_guide_them() -> None:
    assert made(method={"name": "fedl2g", "guides": "logits"}, task={"features": None}).method().requires == ()
    with pytest.raises(InputError, match="fedl2g needs the same number of features"):
        made(method="fedl2g", task={"features": None})
