"""The command line: exit statuses, one sentence for whatever is wrong, and what it prints."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import polyfed
from polyfed import bench
from polyfed.cli.runs import NextFolder
from polyfed.config import experiment
from polyfed.records import RunFolder
from tests.shell import Ended, Shell, is_one_sentence

SMALL = ("--models", "tests.support:Narrow", "--clients", "2", "--rounds", "2", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fedprot",), "unknown method 'fedprot': did you mean 'fedproto'?"),
        (("standalone", "--models", "cnn9"), "unknown network 'cnn9': did you mean 'cnn"),
        (
            ("standalone", "--models", "mine.Net"),
            "unknown network 'mine.Net'.*; one of your own is package.module:name",
        ),
        (("fedproto", "--set", "method.wait=1"), "unknown setting 'method.wait' of fedproto: did you mean 'weight'"),
        (("standalone", "--models", "tests.support:Norrow"), "did you mean 'Narrow'"),
        (("standalone", "--models", "no.such.module:Net"), "can't be imported"),
        (("standalone", "--data", "digit"), "unknown dataset 'digit': did you mean 'digits'?"),
        (("standalone", "--data", "npz:missing.npz"), "missing.npz"),
        (("standalone", "--classes-per-client", "11"), "classes_per_client is 11, .* 10 classes: use 1 to 10"),
        (("standalone", "--participation", "0"), "participation is 0, but must be a number greater than 0 and at"),
        (("standalone", "--clients", "100000"), "100000 clients cannot share the 1797 samples of 'digits': use fewer"),
        (("standalone", "--rounds", "0"), "rounds is 0, but must be a whole number at least 1"),
        (("standalone", "--rounds", "abc"), "rounds is 'abc', but must be a whole number at least 1"),
        (("standalone", "--rounds", "2.5"), "rounds is 2.5, but must be a whole number at least 1"),
        (("standalone", "--lr", "nan"), "training.lr is nan, but must be a finite number greater than 0"),
        (("standalone", "--lr", "inf"), "training.lr is inf, but must be a finite number greater than 0"),
        (("standalone", "--round", "3"), "no such option '--round': did you mean '--rounds'. `.*run --help` lists"),
        (("standalone", "--tracker", "x"), "no such option '--tracker': write --set tracker=VALUE; `.*run --help`"),
        (("standalone", "--momentum=0.9"), "no such option '--momentum': write --set training.momentum=VALUE; "),
        (("fedtgp", "--server-lr", "1"), "no such option '--server-lr': write --set method.server_lr=VALUE; "),
        (("standalone", "--rounds"), "'--rounds' requires an argument"),
        ((), "missing argument 'METHOD|FILE.yaml'"),
        (("standalone", "--out", ""), "--out is empty: name the run's folder"),
        (("standalone", "--split", "a:b:c"), "unknown split 'a:b:c'"),
        (("standalone", "--data", "[red]a"), r"unknown dataset '\[red\]a'"),
        (("standalone", "--data", "npz:x[/b].npz"), r"x\[/b\].npz"),
        (("standalone", "--clients", "1797", "--partition", "iid"), "no client would have a test sample, .* fewer"),
        (("repeated.yaml",), "'repeated.yaml' gives 'rounds' twice, in lines 2 and 3: keep one of them"),
        (("standalone", "--lr", "-1"), "training.lr is -1, but must be a number greater than 0"),
        (("standalone", "--partition", "dirichlett"), "must be one of shares, pathological, dirichlet, iid"),
        (("standalone", "--preset", "papers"), "unknown preset 'papers': did you mean 'paper'?"),
        (("standalone", "--split", "8-1-1"), "split '8-1-1' is not a ratio"),
        (("standalone", "--engine", "ray2"), "unknown engine 'ray2': did you mean 'ray'.* Known: auto, ray, seq"),
        (("standalone", "--device", "cuda:77"), "device is 'cuda:77', which this machine does not have"),
        (("standalone", "--device", "meta"), "device is 'meta', which this machine does not have"),
        (("standalone", "--set", "nonsense"), "--set takes NAME=VALUE, .* not 'nonsense'"),
        (("standalone", "--lr", "1", "--set", "training.lr=2"), "lr is 1 as an option and 2 by --set: keep one"),
        (("standalone", "--rounds", "1", "--set", "rounds=2"), "rounds is 1 as an option and 2 by --set: keep one"),
        (("standalone", "--set", "method=fedtgp"), "the method is standalone as an argument and fedtgp by --set: keep"),
        (("standalone", "--set", "head={1: 2}"), r"head is \{1: 2\}, but must be text"),
        (("standalone", "--set", "rouns=3"), "unknown setting 'rouns': did you mean 'rounds'?"),
        (
            ("standalone", "--set", "a.b=3"),
            "--set accepts method.NAME, .*ray.NAME and plain settings, not 'a.b'",
        ),
        (("standalone", "--set", "training.momentun=1"), "did you mean 'momentum'?"),
        (("standalone", "--set", "training=1"), "training is 1, but must be names with values"),
        (("fedproto", "--set", "method.weight=-1"), "method.weight of fedproto is -1, but must be a number at least 0"),
        (("fedavg", "--models", "cnn4,cnn5"), "fedavg needs the same network .* have cnn4 .* have cnn5; "),
        (
            ("missing.yaml",),
            "can't read the experiment 'missing.yaml': No.*; `polyfed init missing.yaml` writes one",
        ),
        (("broken.yaml",), "'broken.yaml' is not valid YAML: line 2, column 7: expected ',' or ']', but got ':'"),
        (("unknown-engine.yaml",), "unknown engine 'thread': did you mean 'threads'"),
        (("unknown-key.yaml",), "unknown setting 'clinets': did you mean 'clients'?"),
        (("binary.yaml",), "can't read the experiment 'binary.yaml': it is not text in UTF-8"),
        (("standalone", "--out", "file/run"), "can't write to 'file/run'"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "broken.yaml").write_text("method: [fedproto\nrounds: 3")
    (tmp_path / "unknown-key.yaml").write_text("method: fedproto\nclinets: 3")
    (tmp_path / "unknown-engine.yaml").write_text("method: fedproto\nengine: thread")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "file").write_text("")
    (tmp_path / "repeated.yaml").write_text("method: fedproto\nrounds: 3\nrounds: 4\n")
    ended = shell("run", *arguments)
    assert ended.status == 2
    assert re.search(words, ended.error)
    assert is_one_sentence(ended.error), ended.error
    assert not (tmp_path / "runs").exists()


def test_a_run_that_diverges_names_client_round_and_phase(shell: Shell) -> None:
    ended = shell("run", "standalone", *SMALL, "--lr", "1e25")
    assert ended.status == 1
    assert re.search(r"client \d .*round \d, phase 'model'.*--lr", ended.error)
    assert is_one_sentence(ended.error)


def test_a_run_prints_rounds_a_table_and_its_folder(shell: Shell, tmp_path: Path) -> None:
    ended = shell("run", "fedproto", *SMALL)
    assert (ended.status, ended.error) == (0, "")
    lines = [line.rstrip() for line in ended.output.splitlines()]
    assert re.fullmatch(r"round 1/2  accuracy [\d.]+ %  loss [\d.]+  [\d.]+ s  \d+ s left", lines[0])
    for words in ("accuracy, final", "best on validation", "best on test", "communication, up", "FLOPs", "seconds"):
        assert words in ended.output
    assert lines[-1] == "runs/fedproto-digits-seed0"
    assert RunFolder.open(tmp_path / lines[-1]).finished
    assert shell("run", "fedproto", *SMALL, "-q").output == "runs/fedproto-digits-seed0-2\n"


def test_quiet_prints_only_the_folder(shell: Shell) -> None:
    ended = shell("run", "standalone", *SMALL, "--quiet", "--out", "here")
    assert ended == Ended(0, "here\n", "")
    again = shell("run", "standalone", *SMALL, "--out", "here")
    assert again.status == 2
    assert is_one_sentence(again.error)
    assert "'here' already holds a run; continue it with `polyfed resume here --trust`" in again.error
    assert shell("resume", "here", "--quiet") == Ended(0, "here\n", "")
    assert shell("resume", "here").output.startswith("This run is already finished.")
    assert shell("resume", "here", "--from", "1").output == ""
    folder = shell("run", "here")
    assert folder.status == 2
    assert "`polyfed run here/config.yaml`" in folder.error


@pytest.mark.parametrize("name", ["runs/[red]a", "x[/b]", ":b:", "[link=x]y"])
def test_nothing_that_a_user_typed_is_interpreted(shell: Shell, tmp_path: Path, name: str) -> None:
    assert shell("run", "standalone", *SMALL, "-q", "--out", name) == Ended(0, f"{name}\n", "")
    assert (tmp_path / name / "summary.json").exists()
    assert shell("resume", name).output.endswith(f"{name}\n")
    assert f"'{name}' already holds a run" in shell("run", "standalone", *SMALL, "--out", name).error


def test_unknown_commands_and_none_at_all(shell: Shell) -> None:
    ended = shell("rum")
    assert ended.status == 2 and is_one_sentence(ended.error)
    assert "no such command 'rum'" in ended.error
    assert shell().status == 2


def test_ctrl_c_before_the_run_begins_is_one_line_without_advice(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real signal, as if it came while a dataset is decoded."""

    def decode(*arguments: object, **columns: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("polyfed.assemble.load_dataset", decode)
    ended = shell("run", "standalone", *SMALL, "--out", "here")
    assert ended == Ended(130, "", "polyfed: stopped before the run began.\n")
    assert not (tmp_path / "here").exists()


def test_ctrl_c_in_other_commands_is_one_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyfed.report.tables.methods", interrupt)
    assert shell("methods") == Ended(130, "", "polyfed: stopped.\n")


def test_ctrl_c_while_polyfed_is_imported_is_one_line(tmp_path: Path) -> None:
    """A module that polyfed imports sends the signal."""
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(polyfed.__file__).parent.parent)])
    ended = subprocess.run(
        [sys.executable, "-m", "polyfed", "methods"],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "polyfed: stopped before anything ran.\n"


def test_every_public_name_is_found() -> None:
    assert all(getattr(polyfed, name) is not None for name in polyfed.__all__)
    assert {name for names in polyfed._HOMES.values() for name in names} == set(polyfed.__all__)
    assert polyfed.message.Message  # a module that nobody asked for before
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(polyfed, "nothing")  # noqa: B009


def test_bench_says_what_it_measures_and_json_stays_clean(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = bench.Case("a: tiny [red]", models="cnn5", clients=2, participants=1)
    monkeypatch.setattr(bench, "IMAGES", 70)
    monkeypatch.setattr(bench, "CASES", (tiny,))
    ended = shell("bench", "--device", "cpu", "--json")
    assert json.loads(ended.output)["cases"][0]["case"] == "a: tiny [red]"
    assert "measuring 1 of 1, a: tiny [red]: round 7 of 7\n" in ended.error
    assert "the plain loop\n" in ended.error


def test_options_and_settings_reach_the_experiment(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("method: fedproto\nclients: 5\nlr: 0.5\nsplit: 8:1:1\n")
    ended = shell(
        "run", "file.yaml", *SMALL, "--batch-size", "32", "--preset", "released-code", "--epochs", "1",
        "--set", "training.clip=none", "--set", "method.weight=0.5", "--set", "training.augment=false",
        "--set", "split=6:2:2", "--set", "workers=1", "--eval-every", "2", "--out", "run", "--quiet",
    )  # fmt: skip
    assert ended.status == 0, ended.error
    config = RunFolder.open(tmp_path / "run").config
    assert (config.clients, config.eval_every, config.split, config.workers) == (2, 2, "6:2:2", 1)
    assert config.method["name"] == "fedproto"
    assert config.options == {"weight": 0.5, "distance": "euclidean", "penalty": "samples", "mean": "plain"}
    training = config.training
    assert (training.epochs, training.batch_size, training.lr, training.momentum) == (1, 32, 0.01, 0.9)
    assert (training.clip, training.augment) == (None, False)


def test_a_proxy_that_a_file_names_is_code_too(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "proxied.yaml").write_text(
        "method: {name: pfedes, proxy: 'no_such_module_of_a_stranger:Proxy'}\nmodels: cnn5\nclients: 2\nrounds: 1\n"
    )
    ended = shell("run", "proxied.yaml")
    assert (ended.status, "is code that would be run" in ended.error) == (2, True)
    assert "can't be imported" in shell("run", "proxied.yaml", "--trust").error


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = NextFolder(experiment(method="fedproto"))
    with ThreadPoolExecutor(8) as pool:
        paths = {str(path) for path in pool.map(lambda _: name(), range(8))}
    assert len(paths) == 8
    assert {"runs/fedproto-digits-seed0", "runs/fedproto-digits-seed0-8"} <= paths


@pytest.mark.parametrize(
    ("method", "data", "name"),
    [
        ("polyfed.methods.fedproto:FedProto", "digits", "polyfed.methods.fedproto_FedProto-digits-seed0"),
        ("fedproto", "hf:someone/mnist?label=a.b", "fedproto-mnist-seed0"),
        ("fedproto", "npz:données: 1.npz", "fedproto-données__1-seed0"),
    ],
)
def test_every_file_system_accepts_the_name_of_a_run_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, data: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert NextFolder(experiment(method=method, data=data))() == Path("runs") / name


def test_a_run_s_config_runs_again_to_the_same_numbers(shell: Shell, tmp_path: Path) -> None:
    assert shell("run", "lg-fedavg", *SMALL, "--out", "one", "-q").status == 0
    assert shell("run", "one/config.yaml", "--trust", "--out", "two", "-q").status == 0
    one, two = (RunFolder.open(tmp_path / name) for name in ("one", "two"))
    assert one.rounds().drop(columns="seconds").equals(two.rounds().drop(columns="seconds"))
    assert one.config == two.config
    assert yaml.safe_load((tmp_path / "one/config.yaml").read_text())["versions"].keys() >= {"torch", "polyfed"}


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ((), True),
        (("--models", "cnn5"), True),
        (("--models", "cnn5", "--set", "auxiliary=cnn5"), False),
        (("--trust",), False),
    ],
)
def test_code_that_a_file_names_is_not_imported_without_trust(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], refused: bool
) -> None:
    """Also if only the other of the two settings that can name code was replaced."""
    (tmp_path / "code.yaml").write_text("method: fml\nmodels: tests.support:Narrow\nauxiliary: no.such.module:Net\n")
    ended = shell("run", "code.yaml", "--clients", "2", "--rounds", "1", "--split", "9-9", *arguments)
    assert ended.status == 2
    assert ("names code that would be run" in ended.error) == refused


def test_a_preset_is_what_options_and_settings_are_laid_over(shell: Shell, tmp_path: Path) -> None:
    for number, chosen in enumerate((("--preset", "paper"), ("--set", "preset=paper"))):
        options = ("--lr", "0.5", "--set", "training.momentum=0.25", "--out", str(number), "-q")
        assert shell("run", "standalone", *SMALL, *chosen, *options).status == 0
        training = RunFolder.open(tmp_path / str(number)).config.training
        assert (training.lr, training.momentum, training.batch_size) == (0.5, 0.25, 64)


@pytest.mark.parametrize("option", ["--rounds", "--from"])
@pytest.mark.parametrize("number", ["abc", "2.5"])
def test_numbers_of_resume_are_refused_in_the_same_words(shell: Shell, option: str, number: str) -> None:
    assert shell("run", "standalone", *SMALL, "--out", "run", "-q").status == 0
    ended = shell("resume", "run", option, number, "--trust", "-q")
    assert ended.status == 2
    assert re.search(r"is ('abc'|2.5), but must be a whole number at least \d", ended.error)
    assert is_one_sentence(ended.error)


def test_resume_needs_a_run(shell: Shell) -> None:
    ended = shell("resume", "nowhere")
    assert ended == Ended(2, "", "polyfed: 'nowhere' holds no run: it has no config.yaml.\n")


@pytest.mark.parametrize(
    ("what", "keys"),
    [
        ("methods", {"name", "title", "paper", "sends", "reveals", "requires", "options"}),
        ("models", {"name", "kind", "description"}),
        ("datasets", {"name", "title", "classes", "input_shape", "obtained"}),
    ],
)
def test_lists_are_the_same_for_people_and_programs(shell: Shell, what: str, keys: set[str]) -> None:
    ended = shell(what, "--json")
    assert (ended.status, ended.error) == (0, "")
    listed: list[dict[str, Any]] = json.loads(ended.output)
    assert all(keys <= entry.keys() for entry in listed)
    table = shell(what).output
    assert all(entry["name"] in table for entry in listed)


def test_methods_in_json_have_documented_options(shell: Shell) -> None:
    listed = {entry["name"]: entry for entry in json.loads(shell("methods", "--json").output)}
    assert {"standalone", "fedavg", "lg-fedavg", "fedproto"} <= listed.keys()
    for entry in listed.values():
        assert set(entry["requires"]) <= {"features", "head", "network"}
        for option in entry["options"]:
            assert option.keys() == {"name", "default", "range", "description"}
            assert option["range"], f"{entry['name']}: {option['name']}"
            assert option["description"], f"{entry['name']}: {option['name']}"
    weight = next(option for option in listed["fedproto"]["options"] if option["name"] == "weight")
    assert (weight["default"], weight["range"]) == (None, "a number at least 0, or none")


@pytest.mark.parametrize("command", [(), ("run",), ("resume",), ("compare",), ("methods",), ("bench",)])
def test_help_is_plain_text_of_80_columns(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Without frames, which get in the way of copying, and without words that are cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    text = shell(*command, "--help").output
    assert max(map(len, text.splitlines())) <= 80
    assert not set("│╭─╰") & set(text)
    assert "<bool>" not in text and "..." not in text.replace("[ARGS]...", "").replace("FILE.yaml...", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("bench",), "the engine to measure  [default: auto]"),
        (("compare",), "[default: standalone]"),
        (("reproduce",), "[default: small]"),
        (("server", "run"), ""),
        (("site", "run"), ""),
    ],
)
def test_help_has_no_escapes(shell: Shell, command: tuple[str, ...], words: str) -> None:
    """Typer escapes brackets for Rich, which is not what prints them here."""
    text = shell(*command, "--help").output
    assert "\\" not in text and words in text


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("run",), "a method's name, or an experiment file"),
        (("resume",), "the folder of a run"),
        (("site", "init"), "a file that does not exist yet"),
    ],
)
def test_help_describes_arguments(shell: Shell, command: tuple[str, ...], words: str) -> None:
    """With Click 8.5, some versions of Typer lose these words, and others print them twice."""
    assert " ".join(shell(*command, "--help").output.split()).count(words) == 1


def test_help_describes_every_option(shell: Shell) -> None:
    ended = shell("run", "--help")
    assert ended.status == 0
    for option in (
        "data", "partition", "classes-per-client", "alpha", "clients", "participation", "models", "rounds", "epochs",
        "batch-size", "lr", "seed", "engine", "device", "eval-every", "out", "quiet", "set", "preset",
    ):  # fmt: skip
        assert f"--{option}" in ended.output
    words = " ".join(ended.output.replace("│", " ").split())
    assert "from Python only; one of shares, pathological, dirichlet, iid, natural, given (default: shares)" in words
    assert "clients in the federation; with natural, as many as the data have (default: 10)" in words


def test_python_m_polyfed_is_polyfed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["polyfed", "resume", "nowhere"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("polyfed", run_name="__main__")
    assert caught.value.code == 2
    assert "'nowhere' holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [("polyfed meth", "methods"), ("polyfed run fedpr", "fedproto"), ("polyfed methods pfede", "pfedes")],
)
def test_the_shell_can_complete_commands_and_methods(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, words: str, found: str
) -> None:
    for name, value in (("_POLYFED_COMPLETE", "complete_bash"), ("COMP_WORDS", words), ("COMP_CWORD", "")):
        monkeypatch.setenv(name, value or str(words.count(" ")))
    ended = shell()
    assert (ended.status, ended.output.split()) == (0, [found])
