"""The comparison with HtFLlib counts what it says; a few lines stand in for the other library."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
WORK = {"client steps": 4, "samples trained": 256, "samples gathered": 0, "operations": 3_000_000_000}
MODELS = """
class BaseHeadSplit: pass
"""
SERVER = """
import torch
from torch import nn
import h5py_of_htfllib
from flcore.trainmodel import models

class Client:
    def __init__(self, args, number):
        torch.manual_seed(0)
        self.model = nn.Sequential(models.networks[number], nn.Linear(args.feature_dim, args.num_classes))
        self.optimiser = torch.optim.SGD(self.model.parameters(), 0.1)
        self.size = args.batch_size
    def train(self):
        for _ in range(3):
            self.optimiser.zero_grad()
            self.model(torch.zeros(self.size, 3, 32, 32)).sum().backward()
            self.optimiser.step()
    def test_metrics(self):
        with torch.no_grad():
            self.model(torch.zeros(5, 3, 32, 32))

class LG_FedAvg:
    def __init__(self, args, times):
        self.clients = [Client(args, number) for number in range(args.num_clients)]
        self.rounds, self.Budget = args.global_rounds, []
        self.head = nn.Linear(2, 1)
    def select_clients(self):
        return self.clients
    def evaluate(self):
        for client in self.clients:
            client.test_metrics()
    def train(self):
        for number in range(self.rounds + 1):
            chosen = self.select_clients()
            self.evaluate()
            for client in chosen:
                client.train()
            self.head(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(self.head.parameters(), 0.1).step()
            self.Budget.append(float(number))
"""


@pytest.fixture
def htfllib(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    import htfllib

    yield htfllib
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("htfllib", "htfllib_sides", "flcore", "h5py_of_htfllib"):
            del sys.modules[name]


@pytest.fixture
def sides(htfllib: Any) -> ModuleType:
    return sys.modules["htfllib_sides"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script needs of HtFLlib, with one method that does little."""
    core = tmp_path / "HtFLlib" / "system" / "flcore"
    for folder, name, text in (("trainmodel", "models", MODELS), ("servers", "serverlg", SERVER)):
        (core / folder).mkdir(parents=True)
        (core / folder / f"{name}.py").write_text(text)
    return core.parents[1]


def tiny(checkout: Path, rounds: int = 1, *, cpu_time: bool = False) -> Namespace:
    """Two clients with 16 images in batches of 8, tested on 7 images."""
    setting = {"clients": 2, "images": 16, "tests": 7, "batch": 8, "models": "cnn5", "device": "cpu"}
    return Namespace(
        **setting, checkout=checkout, engine="sequential", no_evaluation=False, rounds=rounds, cpu_time=cpu_time
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--images", "100"], "--images 100 is no multiple of --batch 64: HtFLlib drops the last batch."),
        (["--methods", "fedproto,fedavg"], "'fedavg' is not among the methods that both have"),
        (["--checkout", "/"], "'/' is no checkout of HtFLlib: it has no folder system/flcore."),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(
    htfllib: Any, checkout: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        htfllib.parsed(["--checkout", str(checkout), *words])
    assert sentence in capsys.readouterr().err


def test_all_nine_methods_are_compared_unless_some_are_named(htfllib: Any, checkout: Path) -> None:
    assert len(htfllib.parsed(["--checkout", str(checkout)]).methods) == 9
    assert htfllib.parsed(["--checkout", str(checkout), "--methods", "fd,fml"]).methods == ["fd", "fml"]


def test_a_method_of_unequal_work_gets_no_ratio(htfllib: Any) -> None:
    assert htfllib.unequal("fd", {"theirs": WORK, "ours": {**WORK, "operations": 1}}) == ""
    less = {**WORK, "client steps": 2, "server steps": 1000}
    assert htfllib.unequal("fd", {"theirs": WORK, "ours": less}) == (
        "the two sides do not do the same work (client steps: 4 in HtFLlib, 2 in polyfed; "
        "server steps: 0 in HtFLlib, 1,000 in polyfed)"
    )


def test_only_the_method_that_gathers_otherwise_may_gather_otherwise(htfllib: Any) -> None:
    work = {"theirs": WORK, "ours": {**WORK, "samples gathered": 256}}
    assert htfllib.unequal("fedproto", work) == ""
    assert "samples gathered: 0 in HtFLlib, 256 in polyfed" in htfllib.unequal("fedtgp", work)


def test_rows_show_medians_the_first_round_and_both_counts(htfllib: Any, sides: Any) -> None:
    """Median 4 there (of 2, 4, 9) and 0.5 here: eight times faster."""
    turns = htfllib.Turns()
    for seconds in ([2.0], [4.0, 9.0]):
        turns.add("theirs", sides.Measured(10.0 + len(seconds), seconds, WORK))
    turns.add("ours", sides.Measured(1.25, [0.5], {**WORK, "samples gathered": 256}))
    assert htfllib.seconds_row("fedproto", turns) == "| FedProto | 4 | 0.5 | 8.0 | 11 | 1.25 |"
    assert htfllib.work_row("fedproto", turns) == "| FedProto | 4 | 256 | 0 | 0 | 0 | 0 | 0 / 256 | 0 | 3 / 3 |"


@pytest.mark.parametrize(
    ("device", "rounds", "expected"), [("cpu", 3, (2, 3)), ("cuda", 3, (8, 10)), ("cuda", 30, (8, 30))]
)
def test_polyfed_has_captured_its_graphs_before_its_rounds_count(
    htfllib: Any, sides: Any, checkout: Path, device: str, rounds: int, expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sides, "find_device", torch.device)
    monkeypatch.setattr(htfllib, "find_device", lambda name: torch.device("cpu"))  # its name is shown
    given = htfllib.parsed(["--checkout", str(checkout), "--rounds", str(rounds), "--repeats", "2"])
    given.device = device
    assert sides.own_rounds(given) == expected
    medians = f"HtFLlib of {2 * rounds} after 2, polyfed of {2 * expected[1]} after {expected[0]} to warm up."
    assert htfllib.heading(given).endswith(medians)


@pytest.mark.parametrize(("method", "gathered", "server"), [("fedgh", 32, 12), ("lg-fedavg", 0, 0)])
def test_polyfeds_work_in_a_round_is_counted(
    sides: Any, checkout: Path, method: str, gathered: int, server: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two steps of 8 images for each of two clients; FedGH's 20 class means are three batches in each of 4 epochs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sides, "SERVER_EPOCHS", 4)
    found = sides.ours(tiny(checkout), method)
    _, clients = sides.setting(tiny(checkout), method, "sequential")
    network = clients.new_network(0).model
    size, head = (sum(p.numel() for p in part.parameters()) for part in (network, network.head))
    operations = found.work.pop("operations")
    assert found.work == {
        name: count
        for name, count in {
            "client steps": 4, "samples trained": 32, "samples gathered": gathered, "samples evaluated": 14,
            "parameters updated, clients": 4 * size, "server steps": server,
            "parameters updated, server": server * head,
        }.items()
        if count
    }  # fmt: skip
    # Every weight of a linear layer is used in two operations per sample, and in four of its gradient.
    assert operations > 6 * 32 * head
    assert len(found.seconds) == 1 and found.first > 0


def test_an_engine_that_did_something_else_is_refused(
    sides: Any, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sides, "counted_here", lambda *_: (WORK, 5))
    with pytest.raises(sides.RunError, match=r"is timed recorded \d+ operations of clients, the sequential 5\."):
        sides.ours(tiny(checkout), "lg-fedavg")


def test_the_second_round_there_is_counted_and_missing_packages_are_stood_in_for(
    sides: Any, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two clients takes three steps of 8 samples and is tested on five; the server's step changes three."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sides, "NOT_NEEDED", ("h5py_of_htfllib", "json"))
    found = sides.theirs(tiny(checkout, rounds=2), "lg-fedavg")
    _, clients = sides.setting(tiny(checkout), "lg-fedavg", "sequential")
    size = sum(p.numel() for p in clients.new_network(0).model.parameters())
    assert found.work.pop("operations") > 0
    assert found.work == {
        "client steps": 6, "samples trained": 48, "samples evaluated": 10, "parameters updated, clients": 6 * size,
        "server steps": 1, "parameters updated, server": 3,
    }  # fmt: skip
    assert (found.first, found.seconds) == (0.0, [2.0, 3.0])  # by HtFLlib's own clock
    assert found.stand_ins == ["h5py_of_htfllib"]
    assert Path.cwd() == tmp_path
    shutil.rmtree("dataset")
    on_cpu = sides.theirs(tiny(checkout, cpu_time=True), "lg-fedavg").seconds
    assert len(on_cpu) == 1 and on_cpu[0] != 2.0


def test_a_method_that_fails_says_why_and_the_next_one_runs(
    htfllib: Any, sides: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measure(given: Namespace, method: str) -> Any:
        print("progress")  # must not be read as an answer
        if method == "fd":
            raise RuntimeError("no luck")
        return sides.Measured(1.0, [2.0], {})

    monkeypatch.setattr(htfllib, "theirs", measure)
    monkeypatch.setattr(sys, "stdin", io.StringIO("fd\nfedgh\n"))
    monkeypatch.chdir(checkout)
    htfllib.work_as("theirs", tiny(checkout))
    failed, fine = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert failed == {"failure": "fails: RuntimeError: no luck"}
    assert sides.Measured(**fine) == sides.Measured(1.0, [2.0], {})


def test_a_side_that_takes_too_long_is_ended(htfllib: Any, checkout: Path) -> None:
    side = htfllib.Side("ours", ["--checkout", str(checkout)], timeout=0.05)
    assert side.measure("fd") == "takes longer than 0.05 s (--timeout)"
    assert side.measure("fd") == "takes longer than 0.05 s (--timeout)"  # in a new process
    side.close()


def test_a_copy_inside_another_repository_has_no_commit_of_its_own(htfllib: Any, tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    (tmp_path / "copy").mkdir()
    assert len(htfllib.commit(tmp_path)) == 40
    assert htfllib.commit(tmp_path / "copy") == "of an unknown commit"
