"""Where a resumed run starts: from its last checkpoint, from an earlier one, or from its end for more rounds."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import polyfed
from polyfed import InputError, RunFolder, Watcher
from polyfed.message import State
from polyfed.server.federation import Interrupted
from tests import support
from tests.stopping import StopAfterTwo, notes, records, stopped, tiny


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
    assert notes(result.folder.path) == ["until round 1 the run was on one machine; it continues on another"]


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide]}
    whole = polyfed.run("standalone", **support.DEFAULTS, **own, out=tmp_path / "run")
    before = records(tmp_path / "run")
    again = polyfed.resume(tmp_path / "run", **own)
    assert again.summary == whole.summary
    assert records(tmp_path / "run") == before


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
    assert notes(tmp_path / "stopped") == [
        f"a checkpoint is damaged, so the run continues after round 1: manifest.json: '{torn.name}' is damaged"
    ]


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
    plans = polyfed.METHODS[method].depends_on_rounds
    assert any("plans ahead for all rounds" in note for note in notes(longer.folder.path)) == plans
    if not plans:
        polyfed.run(**{**settings, "rounds": 4}, **own, out=tmp_path / "whole")
        assert records(tmp_path / "run") == records(tmp_path / "whole")


@pytest.mark.parametrize("method", ["fedkd", "fedssa", "fedproto"])
def test_rounds_changed_in_the_file_are_noted_like_those_asked_for(tmp_path: Path, method: str) -> None:
    """Once, and only by methods that plan ahead; a run that starts from the beginning plans for the new number."""
    run = stopped(tmp_path / "run", method=method)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("rounds: 4", "rounds: 5"))
    with pytest.raises(Interrupted):
        polyfed.resume(run, **tiny(), watcher=StopAfterThree())
    polyfed.resume(run, **tiny())
    plans = polyfed.METHODS[method].depends_on_rounds
    assert [note for note in notes(run) if "plans ahead" in note] == plans * [
        f"{method} plans ahead for all rounds, so a run that had 5 from the beginning would give other numbers"
    ]
    again = stopped(tmp_path / "again", method=method)
    polyfed.resume(again, **tiny(), rounds=3, from_round=0)
    assert not any("plans ahead" in note for note in notes(again))


def test_more_rounds_can_be_asked_for_before_the_end_too(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run", rounds=3)
    whole = polyfed.run(**{**support.DEFAULTS, "method": "fedproto", "rounds": 5}, **tiny(), out=tmp_path / "whole")
    polyfed.resume(run, **tiny(), rounds=5)
    assert records(run) == records(whole.folder.path)
    with pytest.raises(polyfed.InputError, match=r"is finished, after round 5: it can only continue .*--rounds 10"):
        polyfed.resume(run, **tiny(), rounds=4)


def test_fewer_rounds_than_there_were_are_refused(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    with pytest.raises(polyfed.InputError, match="has already had 2 rounds, more than 1"):
        polyfed.resume(run, **tiny(), rounds=1)
    assert polyfed.RunFolder.open(run).config.rounds == 4


class StopAfterThree(Watcher):
    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.stop_requested = round == 3


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
    assert notes(other.folder.path) == ["from round 21 on, training.lr is 0.01, not 0.1"]


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
    assert notes(result.folder.path) == ["the checkpoint of round 1 could not be written (out of memory)"]


def test_fedkd_sends_the_network_to_clients_whose_states_are_lost(tmp_path: Path) -> None:
    """After round 2 the server expects all clients to hold version 1, but those that are repaired hold nothing."""
    path = stopped(tmp_path / "run", method="fedkd")
    for file in (path / "checkpoint").glob("clients-*"):
        file.write_bytes(b"torn")
    result = polyfed.resume(path, repair=True, **tiny())
    assert result.rounds.replies.tolist() == [4, 4, 4, 4]
    floats = result.rounds.download_floats.tolist()
    assert floats[2] == floats[0] > max(floats[1], floats[3])


def without(state: State, names: Collection[str]) -> State:
    return {name: tensor for name, tensor in state.items() if name.split(".")[0] not in names}


@pytest.mark.parametrize(("method", "gone"), [("fedkd", {"received"}), ("fedapen", {"adapted"})])
def test_models_of_an_older_version_are_read_or_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, gone: set[str]
) -> None:
    """A client's private model needs nothing of what a later version keeps beside it."""
    result = polyfed.run(method, **support.DEFAULTS, **tiny(), out=tmp_path / "run")
    expected = result.network(0).model.state_dict()
    saved = result.folder.model_state(0)
    monkeypatch.setattr(RunFolder, "model_state", lambda self, client: without(saved, gone))
    old = polyfed.resume(tmp_path / "run", **tiny())
    for name, tensor in old.model(0).state_dict().items():
        assert torch.equal(tensor, expected[name])
    with pytest.raises(InputError, match=f"client 0 in .* '{min(gone)}.* is missing; if another version of polyfed"):
        old.network(0)


@pytest.mark.parametrize(("method", "gone"), [("fedgh", "modules"), ("fd", "state"), ("dc-pfl", "modules")])
def test_a_server_of_an_older_version_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, gone: str
) -> None:
    polyfed.run(method, **support.DEFAULTS, **tiny(), out=tmp_path / "run")
    named = polyfed.RunFolder(tmp_path / "run").server_state()
    monkeypatch.setattr(RunFolder, "server_state", lambda self: without(named, {gone}))
    old = polyfed.resume(tmp_path / "run", **tiny())
    with pytest.raises(InputError, match=rf"server's state in .*: '{gone}\..*' is missing; if another version"):
        _ = old.server


def test_a_run_that_continues_with_another_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stopped(tmp_path / "run")
    monkeypatch.setattr("polyfed.records.folder.version", lambda name: "99.0")
    polyfed.resume(path, **tiny())
    (note,) = notes(path)
    assert note.startswith("until round 2 the run was made by polyfed 0") and "continues with 99.0" in note


def test_a_finished_run_with_clients_elsewhere_is_only_read(tmp_path: Path) -> None:
    polyfed.run(**{**support.DEFAULTS, "method": "fedproto", "rounds": 1}, **tiny(), out=tmp_path / "run")
    claim = tmp_path / "run" / "run.json"
    claim.write_text(claim.read_text().replace("{", '{"command": "polyfed server run terms.yaml",', 1))
    assert polyfed.resume(tmp_path / "run").summary["rounds"] == 1
    with pytest.raises(InputError, match="are elsewhere: continue it with `polyfed server run terms.yaml`"):
        polyfed.resume(tmp_path / "run", rounds=2)
