"""What a run may be resumed with: the settings, data and networks that it started with."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torch import nn

import polyfed
from polyfed.server.federation import Interrupted
from tests import support
from tests.stopping import StopAfterTwo, records, stopped, tiny


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"training": {"lr": 0.2}}, "training.lr is 0.2, but the run in '.*run' started with 0.1"),
        ({"training": {"momentum": 0.9}}, "training.momentum is 0.9, but the run in .* started with 0.0"),
        ({"training": {"clip": 1.0}}, "training.clip is 1.0, but the run in .* started with none"),
        ({"seed": 1}, "seed is 1, but the run in .* started with 0"),
        ({"partition": "iid"}, "partition is iid, but the run in .* started with shares"),
        ({"classes_per_client": 3}, "classes_per_client is 3"),
        ({"models": "python:Wide"}, "models is python:Wide, but the run in .* started with python:Wide,Narrow"),
        ({"clients": 3}, "clients is 3, but the run in .* started with 4"),
        ({"method": {"name": "fedtgp"}}, "method.name is fedtgp, but the run in .* started with fedproto"),
        ({"method": {"weight": 3.0}}, "method.weight is 3.0, but the run in .* started with none"),
        ({"split": "6:2:2"}, "split is 6:2:2"),
        ({"participation": 0.5}, "participation is 0.5"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    run = stopped(tmp_path / "run")
    content = yaml.safe_load((run / "config.yaml").read_text())
    for name, value in change.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) and "name" not in value else value
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    before = records_of(run)
    with pytest.raises(polyfed.InputError, match=words):
        polyfed.resume(run, **tiny())
    assert records_of(run) == before


def records_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_settings_that_change_no_numbers_may_change(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    content = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**content, "engine": "threads", "workers": 2}))
    whole = polyfed.run(**{**support.DEFAULTS, "method": "fedproto", "rounds": 4}, **tiny(), out=tmp_path / "whole")
    polyfed.resume(run, **tiny())
    assert records(run) == records(whole.folder.path)


def test_other_data_are_refused(tmp_path: Path) -> None:
    """As many samples as before, but one pixel is another; or more samples, which would be dealt out anew."""
    run = stopped(tmp_path / "run")
    data = support.tiny_dataset()
    data.images[5, 0, 0, 0] += 1
    with pytest.raises(polyfed.InputError, match="the data is 120 samples .*, but the run .* started with 120 samples"):
        polyfed.resume(run, data=data, models=tiny()["models"])
    more = support.tiny_dataset(per_class=32)
    with pytest.raises(polyfed.InputError, match="the data is 128 samples .*, but the run .* started with 120 samples"):
        polyfed.resume(run, data=more, models=tiny()["models"])


def test_other_networks_of_the_same_name_are_refused(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")

    class Narrow(support.Narrow):
        def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
            support.Wide.__init__(self, input_shape, classes, hidden=9)

    with pytest.raises(polyfed.InputError, match="the network Narrow is one with hash .*, but the run .* started with"):
        polyfed.resume(run, data=support.tiny_dataset(), models=[support.Wide, Narrow])


def test_networks_of_other_names_are_refused(tmp_path: Path) -> None:
    """The settings only say that networks came from Python, so this is seen by the networks themselves."""
    run = stopped(tmp_path / "run")

    class Other(support.Narrow):
        """The same by another name: its clients would start from other weights."""

    for models in ([support.Wide, Other], [support.Wide], [support.Wide, support.Narrow, Other]):
        with pytest.raises(polyfed.InputError, match=r"the network (Other is new|Narrow is gone).*start a new run"):
            polyfed.resume(run, data=support.tiny_dataset(), models=models)


def test_networks_with_other_layers_of_the_same_weights_are_refused(tmp_path: Path) -> None:
    def with_activation(layer: type[nn.Module]) -> Callable[[int], nn.Module]:
        def net(classes: int) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), layer(), nn.Linear(5, classes))

        return net

    settings = {**support.DEFAULTS, "method": "standalone", "rounds": 3, "data": support.tiny_dataset()}
    with pytest.raises(Interrupted):
        polyfed.run(**settings, models=with_activation(nn.ReLU), out=tmp_path / "run", watcher=StopAfterTwo())
    with pytest.raises(polyfed.InputError, match="the network net is one with hash"):
        polyfed.resume(tmp_path / "run", data=settings["data"], models=with_activation(nn.Tanh))


def test_settings_for_resume_are_a_mapping(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    with pytest.raises(polyfed.InputError, match="settings is .*, but must be a mapping, such as"):
        polyfed.resume(run, **tiny(), settings=["lr"])  # type: ignore[arg-type]


def test_a_given_network_with_other_weights_is_refused(tmp_path: Path) -> None:
    nets = [support.Wide((1, 6, 6), 4) for _ in range(2)]
    settings = {**support.DEFAULTS, "method": "standalone", "rounds": 3, "data": support.tiny_dataset()}
    with pytest.raises(Interrupted):
        polyfed.run(**settings, models=nets[0], out=tmp_path / "run", watcher=StopAfterTwo())
    with pytest.raises(polyfed.InputError, match="the network Wide is one with hash"):
        polyfed.resume(tmp_path / "run", data=settings["data"], models=nets[1])
    assert len(polyfed.resume(tmp_path / "run", data=settings["data"], models=nets[0]).rounds) == 3


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    one, other = stopped(tmp_path / "one"), stopped(tmp_path / "other", seed=1)
    shutil.rmtree(one / "checkpoint")
    shutil.copytree(other / "checkpoint", one / "checkpoint")
    with pytest.raises(polyfed.InputError, match="is the checkpoint of another run"):
        polyfed.resume(one, **tiny())


@pytest.mark.parametrize("change", [{"seed": 3}, {"method": "fedavg"}, {"clients": 5}, {"split": "6:2:2"}])
def test_what_makes_another_federation_can_not_change_on_the_way(tmp_path: Path, change: dict[str, Any]) -> None:
    run = stopped(tmp_path / "run")
    with pytest.raises(polyfed.InputError, match="can't change in the middle of a run"):
        polyfed.resume(run, **tiny(), settings=change)


@pytest.mark.parametrize(("missing", "words"), [("data", "pass it again"), ("models", "pass them again")])
def test_what_came_from_python_must_be_passed_again(tmp_path: Path, missing: str, words: str) -> None:
    """To read numbers it need not."""
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide]}
    whole = polyfed.run("standalone", **support.DEFAULTS, **own, out=tmp_path / "run")
    rest = {name: value for name, value in own.items() if name != missing}
    result = polyfed.resume(tmp_path / "run", **rest)
    assert result.rounds.equals(whole.rounds)
    with pytest.raises(polyfed.InputError, match=words):
        result.model(0)
    with pytest.raises(polyfed.InputError, match=words):
        polyfed.resume(tmp_path / "run", rounds=4, **rest)


def test_a_finished_run_is_read_from_another_folder_without_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = support.tiny_dataset()
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir(), elsewhere.mkdir()
    np.savez(home / "mine.npz", x=data.images.numpy(), y=data.labels.numpy())
    monkeypatch.chdir(home)
    settings = {**support.DEFAULTS, "data": "npz:mine.npz", "models": [support.Wide]}
    polyfed.run("standalone", **settings, out="finished")
    with pytest.raises(Interrupted):
        polyfed.run("standalone", **{**settings, "rounds": 3}, out="stopped", watcher=StopAfterTwo())
    monkeypatch.chdir(elsewhere)
    assert len(polyfed.resume(home / "stopped", models=[support.Wide]).rounds) == 3  # the path is seen from there
    (home / "mine.npz").unlink()
    assert len(polyfed.resume(home / "finished").rounds) == 2
