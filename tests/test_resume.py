"""A run that was stopped, by Ctrl-C or by kill -9 at any moment, goes on to the numbers it would have given."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from torch import nn

import polyfed
from polyfed import Watcher, cli
from polyfed.server.federation import Interrupted
from tests import support

SMALL = '''
import os, signal
from torch import nn
from polyfed.records import disk

class Small(nn.Sequential):
    """A small network of the user's own."""

    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, classes))

class Smaller(nn.Sequential):
    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))

# "checkpoint 3": the process kills itself in the middle of writing its third file into a folder of that name.
place, _, count = os.environ.get("DIE_AT", "").partition(" ")
if place:
    write, left = disk.write, iter(range(int(count) - 1, -1, -1))
    def dying(path, content, **options):
        if path.parent.name == place and next(left) == 0:
            data = content.encode() if isinstance(content, str) else content
            path.with_name(f".{path.name}.0123abcd.new").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content, **options)
    disk.write = dying
'''
ROUNDS = 24
SETTINGS: dict[str, Any] = {
    "data": "digits", "models": "small_of_user:Small,small_of_user:Smaller", "clients": 6, "participation": 0.5,
    "rounds": ROUNDS, "eval_every": 2, "seed": 3, "checkpoint_every": 1, "device": "cpu", "method": "fedproto",
}  # fmt: skip


processes = multiprocessing.get_context("forkserver")  # imports torch, which takes seconds, once for all
processes.set_forkserver_preload(["polyfed.cli", "sklearn.datasets"])


def start(folder: Path, *arguments: str, die_at: str = "") -> BaseProcess:
    """`polyfed` in a process of its own, which writes into output.txt and errors.txt."""
    process = processes.Process(target=command, args=(folder, arguments, die_at))
    process.start()
    return process


def command(folder: Path, arguments: tuple[str, ...], die_at: str) -> None:
    os.chdir(folder)
    os.environ["DIE_AT"] = die_at
    for name, number in (("output.txt", 1), ("errors.txt", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["polyfed", *arguments]
    cli.main()


def ended(process: BaseProcess, folder: Path) -> int | None:
    """A process's exit status; what it said about errors is shown when a test fails."""
    process.join(60)
    print((folder / "errors.txt").read_text())
    return process.exitcode


def checkpoint_round(run: Path) -> int:
    try:
        return int(json.loads((run / "checkpoint" / "manifest.json").read_text())["round"])
    except (OSError, ValueError):
        return 0


def wait_for_round(process: BaseProcess, run: Path, round: int) -> None:
    """Until the run has a checkpoint of that round, or has ended."""
    deadline = time.monotonic() + 60
    while checkpoint_round(run) < round and process.is_alive():
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)


def records(run: Path) -> dict[str, Any]:
    """Everything in a run's folder that must not depend on interruptions."""
    rounds = pd.read_csv(run / "rounds.csv", dtype=str).drop(columns="seconds")
    texts = {name: (run / name).read_text() for name in ("clients.csv", "evaluations.csv", "confusion.csv")}
    models = {path.name: path.read_bytes() for path in sorted((run / "models").iterdir())}
    return {"rounds": rounds.to_csv(), **texts, **models}


def test_a_run_killed_again_and_again_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the midst of writing a checkpoint, at random moments, and in the midst of writing the models.

    Where exactly is drawn anew each time; a failure shows the seed.
    """
    (tmp_path / "small_of_user.py").write_text(SMALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    polyfed.run(**SETTINGS, out=tmp_path / "whole")

    (tmp_path / "killed.yaml").write_text(polyfed.experiment(**SETTINGS).to_yaml())
    run, chance = tmp_path / "killed", random.Random(random.getrandbits(32))
    process = start(
        tmp_path, "run", "killed.yaml", "--trust", "--out", "killed", die_at=f"checkpoint {chance.randint(1, 20)}"
    )
    assert ended(process, tmp_path) == -signal.SIGKILL
    for _ in range(2):
        process = start(tmp_path, "resume", "killed", "--trust")
        wait_for_round(process, run, checkpoint_round(run) + chance.randint(1, 3))
        time.sleep(chance.random() * 0.05)
        process.kill()
        assert ended(process, tmp_path) == -signal.SIGKILL
    process = start(tmp_path, "resume", "killed", "--trust", die_at=f"models {chance.randint(1, 6)}")
    assert ended(process, tmp_path) == -signal.SIGKILL
    assert checkpoint_round(run) == ROUNDS - 1
    process = start(tmp_path, "resume", "killed", "--trust", "--quiet")
    assert ended(process, tmp_path) == 0
    assert (tmp_path / "output.txt").read_text() == "killed\n"
    assert records(run) == records(tmp_path / "whole")


def test_ctrl_c_finishes_the_round_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "small_of_user.py").write_text(SMALL)
    text = polyfed.experiment(**{**SETTINGS, "rounds": 2000, "eval_every": 1}).to_yaml()
    (tmp_path / "long.yaml").write_text(text)
    process = start(tmp_path, "run", "long.yaml", "--trust", "--out", "stopped")
    wait_for_round(process, tmp_path / "stopped", 2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    assert ended(process, tmp_path) == 130
    rows = pd.read_csv(tmp_path / "stopped" / "rounds.csv")
    last = (tmp_path / "errors.txt").read_text().splitlines()[-1]
    assert last == f"polyfed: stopped after round {len(rows)} of 2000; go on with `polyfed resume stopped`."
    assert "Stopping after this round" in (tmp_path / "output.txt").read_text()
    assert checkpoint_round(tmp_path / "stopped") == len(rows)


class StopAfterTwo(Watcher):
    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.stop_requested = round == 2


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such locks")
def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    class Impatient(Watcher):
        """Tries to resume the run that it watches."""

        def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
            with pytest.raises(polyfed.InputError, match="another process is working on"):
                polyfed.resume(tmp_path / "run")

    polyfed.run("standalone", clients=2, rounds=2, out=tmp_path / "run", watcher=Impatient(), device="cpu")
    assert polyfed.resume(tmp_path / "run").rounds["round"].tolist() == [1, 2]


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_every_method_goes_on_from_its_checkpoint(tmp_path: Path, method: str) -> None:
    """The server's networks and states, the clients' modules and all seeds come back."""
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    if "network" in polyfed.METHODS[method].requires:
        own["models"] = [support.Wide]
    settings = {**support.DEFAULTS, "method": method, "rounds": 3, "participation": 0.5, "split": "6:2:2"}
    polyfed.run(**settings, **own, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **own, out=tmp_path / "stopped", watcher=StopAfterTwo())
    polyfed.resume(tmp_path / "stopped", **own)
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_a_run_tells_where_it_began_and_where_it_went_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopping(Watcher):
        stop_requested = True

    settings = {**support.DEFAULTS, "data": support.tiny_dataset(), "models": [support.Wide], "rounds": 3}
    monkeypatch.setattr("polyfed.api.machine_name", lambda device: "one machine")
    with pytest.raises(Interrupted):
        polyfed.run("standalone", **settings, out=tmp_path / "run", watcher=Stopping())
    monkeypatch.setattr("polyfed.api.machine_name", lambda device: "another")
    result = polyfed.resume(tmp_path / "run", data=settings["data"], models=settings["models"])
    starts = [(event["round"], event["engine"], event["machine"]) for event in result.folder.starts()]
    assert starts == [(0, "sequential", "one machine"), (1, "sequential", "another")]
    assert "torch" in result.folder.origin() and result.folder.origin().count("polyfed") == 2
    notes = [event["note"] for event in result.folder.events() if event["event"] == "note"]
    assert notes == ["until round 1 the run was on one machine; it continues on another"]


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide]}
    whole = polyfed.run("standalone", **support.DEFAULTS, **own, out=tmp_path / "run")
    before = records(tmp_path / "run")
    again = polyfed.resume(tmp_path / "run", **own)
    assert again.summary == whole.summary
    assert records(tmp_path / "run") == before


@pytest.mark.parametrize(("missing", "words"), [("data", "hand it over again"), ("models", "hand them over again")])
def test_what_came_from_python_must_be_handed_over_again(tmp_path: Path, missing: str, words: str) -> None:
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


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(tmp_path: Path) -> None:
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    settings = {**support.DEFAULTS, "method": "fedproto", "rounds": 4, "checkpoint_every": 1}
    polyfed.run(**settings, **own, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **own, out=tmp_path / "stopped", watcher=StopAfterTwo())
    (torn,) = (tmp_path / "stopped" / "checkpoint").glob("server.2.*")
    torn.write_bytes(b"torn")
    polyfed.resume(tmp_path / "stopped", **own)
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    notes = [event["note"] for event in polyfed.RunFolder(tmp_path / "stopped").events() if event["event"] == "note"]
    assert notes == [
        f"a checkpoint is damaged, so the run goes on after round 1: manifest.json: '{torn.name}' is damaged"
    ]


# With what a run may go on ----------------------------------------------------------------------------------------


def tiny() -> dict[str, Any]:
    return {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}


def stopped(path: Path, **settings: Any) -> Path:
    """A run that stopped after round 2."""
    settings = {**support.DEFAULTS, "method": "fedproto", "rounds": 4, "checkpoint_every": 1, **settings}
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **tiny(), out=path, watcher=StopAfterTwo())
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"training": {"lr": 0.2}}, "training.lr is 0.2, but the run in '.*run' began with 0.1"),
        ({"training": {"momentum": 0.9}}, "training.momentum is 0.9, but the run in .* began with 0.0"),
        ({"training": {"clip": 1.0}}, "training.clip is 1.0, but the run in .* began with none"),
        ({"seed": 1}, "seed is 1, but the run in .* began with 0"),
        ({"partition": "iid"}, "partition is iid, but the run in .* began with shares"),
        ({"classes_per_client": 3}, "classes_per_client is 3"),
        ({"models": "python:Wide"}, "models is python:Wide, but the run in .* began with python:Wide,Narrow"),
        ({"clients": 3}, "clients is 3, but the run in .* began with 4"),
        ({"method": {"name": "fedtgp"}}, "method.name is fedtgp, but the run in .* began with fedproto"),
        ({"method": {"weight": 3.0}}, "method.weight is 3.0, but the run in .* began with none"),
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
    with pytest.raises(polyfed.InputError, match="the data is 120 samples .*, but the run .* began with 120 samples"):
        polyfed.resume(run, data=data, models=tiny()["models"])
    more = support.tiny_dataset(per_class=32)
    with pytest.raises(polyfed.InputError, match="the data is 128 samples .*, but the run .* began with 120 samples"):
        polyfed.resume(run, data=more, models=tiny()["models"])


def test_other_networks_of_the_same_name_are_refused(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")

    class Narrow(support.Narrow):
        def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
            support.Wide.__init__(self, input_shape, classes, hidden=9)

    with pytest.raises(polyfed.InputError, match="the network Narrow is one with hash .*, but the run .* began with"):
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


def test_a_run_whose_checkpoints_are_gone_does_not_start_again_unasked(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    shutil.rmtree(run / "checkpoint")
    with pytest.raises(polyfed.InputError, match="all checkpoints of .* are gone: .*--from 0"):
        polyfed.resume(run, **tiny())
    assert pd.read_csv(run / "rounds.csv")["round"].tolist() == [1, 2]
    result = polyfed.resume(run, **tiny(), from_round=0)
    assert result.rounds["round"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_a_finished_run_goes_on_to_more_rounds(tmp_path: Path, method: str) -> None:
    """As if it had had them from the beginning, unless the method plans ahead; that is said."""
    own = {**tiny(), "models": [support.Wide]} if "network" in polyfed.METHODS[method].requires else tiny()
    settings = {**support.DEFAULTS, "method": method, "participation": 0.5, "split": "6:2:2"}
    polyfed.run(**{**settings, "rounds": 2}, **own, out=tmp_path / "run")
    longer = polyfed.resume(tmp_path / "run", **own, rounds=4)
    assert longer.folder.config.rounds == 4
    assert longer.rounds["round"].tolist() == [1, 2, 3, 4]
    notes = [event["note"] for event in longer.folder.events() if event["event"] == "note"]
    plans = polyfed.METHODS[method].depends_on_rounds
    assert any("plans ahead for all rounds" in note for note in notes) == plans
    if not plans:
        polyfed.run(**{**settings, "rounds": 4}, **own, out=tmp_path / "whole")
        assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_more_rounds_can_be_asked_for_before_the_end_too(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run", rounds=3)
    whole = polyfed.run(**{**support.DEFAULTS, "method": "fedproto", "rounds": 5}, **tiny(), out=tmp_path / "whole")
    polyfed.resume(run, **tiny(), rounds=5)
    assert records(run) == records(whole.folder.path)
    with pytest.raises(polyfed.InputError, match=r"is finished, after round 5: it can only go on .*--rounds 10"):
        polyfed.resume(run, **tiny(), rounds=4)


def test_fewer_rounds_than_there_were_are_refused(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    with pytest.raises(polyfed.InputError, match="has already had 2 rounds, more than 1"):
        polyfed.resume(run, **tiny(), rounds=1)
    assert polyfed.RunFolder.open(run).config.rounds == 4


class StopAfter23(Watcher):
    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.stop_requested = round == 23


def test_a_run_goes_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    settings = {**support.DEFAULTS, "method": "fedproto", "rounds": 24, "checkpoint_every": 1}
    whole = polyfed.run(**settings, **tiny(), out=tmp_path / "whole")
    for name in ("same", "other"):
        with pytest.raises(Interrupted):
            polyfed.run(**settings, **tiny(), out=tmp_path / name, watcher=StopAfter23())
    with pytest.raises(polyfed.InputError, match="no checkpoint of round 5 in .*; there are 0, 10, 20, 22, 23"):
        polyfed.resume(tmp_path / "same", **tiny(), from_round=5)
    polyfed.resume(tmp_path / "same", **tiny(), from_round=10)
    assert records(tmp_path / "same") == records(whole.folder.path)

    other = polyfed.resume(tmp_path / "other", **tiny(), from_round=20, settings={"training": {"lr": 0.01}})
    columns = ["accuracy_mean", "loss_mean"]
    assert other.rounds[columns][:20].equals(whole.rounds[columns][:20])
    assert not (other.rounds.loss_mean[20:] == whole.rounds.loss_mean[20:]).any()
    assert other.folder.config.training.lr == 0.01
    notes = [event["note"] for event in other.folder.events() if event["event"] == "note"]
    assert notes == ["from round 21 on, training.lr is 0.01, not 0.1"]


@pytest.mark.parametrize("change", [{"seed": 3}, {"method": "fedavg"}, {"clients": 5}, {"split": "6:2:2"}])
def test_what_makes_another_federation_can_not_change_on_the_way(tmp_path: Path, change: dict[str, Any]) -> None:
    run = stopped(tmp_path / "run")
    with pytest.raises(polyfed.InputError, match="can't change in the middle of a run"):
        polyfed.resume(run, **tiny(), settings=change)


def test_after_a_divergence_the_error_says_how_to_go_back(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run", rounds=9)
    with pytest.raises(polyfed.RunError, match=r"To go back, use `polyfed resume .*run --from \d+ --set training.lr="):
        polyfed.resume(run, **tiny(), settings={"training": {"lr": 1e25}})
    result = polyfed.resume(run, **tiny(), from_round=1, settings={"training": {"lr": 0.1}})
    whole = polyfed.run(**{**support.DEFAULTS, "method": "fedproto", "rounds": 9}, **tiny(), out=tmp_path / "whole")
    assert records(result.folder.path) == records(whole.folder.path)


def test_one_damaged_file_of_states_costs_nothing(tmp_path: Path) -> None:
    """With half of the clients in a round, checkpoints share the files of those that rest."""
    settings = {**support.DEFAULTS, "method": "fedproto", "rounds": 6, "checkpoint_every": 1, "participation": 0.25}
    whole = polyfed.run(**settings, **tiny(), out=tmp_path / "whole")
    run = stopped(tmp_path / "run", rounds=6, participation=0.25)
    for file in sorted((run / "checkpoint").glob("clients-*.safetensors")):
        shutil.copytree(run, tmp_path / file.name)
        (tmp_path / file.name / "checkpoint" / file.name).write_bytes(b"torn")
        polyfed.resume(tmp_path / file.name, **tiny())
        assert records(tmp_path / file.name) == records(whole.folder.path)


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


# Signals and memory ----------------------------------------------------------------------------------------------


def test_sigterm_finishes_the_round_as_ctrl_c_does(tmp_path: Path) -> None:
    text = polyfed.experiment(**{**SETTINGS, "models": "cnn5", "rounds": 2000, "eval_every": 1}).to_yaml()
    (tmp_path / "long.yaml").write_text(text)
    process = start(tmp_path, "run", "long.yaml", "--out", "stopped")
    wait_for_round(process, tmp_path / "stopped", 1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process, tmp_path) == 143
    rows = pd.read_csv(tmp_path / "stopped" / "rounds.csv")
    assert checkpoint_round(tmp_path / "stopped") == len(rows)
    assert "go on with `polyfed resume stopped`" in (tmp_path / "errors.txt").read_text()


def short_of_memory(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory")


def test_a_lack_of_memory_at_the_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("polyfed.assemble.partition", short_of_memory)
        with pytest.raises(polyfed.RunError, match="the experiment does not fit into memory: .*smaller networks"):
            polyfed.run("standalone", **support.DEFAULTS, **tiny(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        patch.setattr("polyfed.population.Population.on_device", short_of_memory)
        with pytest.raises(polyfed.RunError, match="the run does not fit into memory"):
            polyfed.run("standalone", **support.DEFAULTS, **tiny(), out=tmp_path / "run")


def test_a_checkpoint_that_does_not_fit_into_memory_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**support.DEFAULTS, "method": "standalone", "checkpoint_every": 1}
    with monkeypatch.context() as patch:
        patch.setattr("polyfed.records.states.stacked", short_of_memory)
        result = polyfed.run(**settings, **tiny(), out=tmp_path / "run")
    notes = [event["note"] for event in result.folder.events() if event["event"] == "note"]
    assert notes == ["the checkpoint of round 1 could not be written (out of memory)"]
