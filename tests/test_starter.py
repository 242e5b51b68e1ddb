"""The file that `polyfed init` writes: it runs as it is, and what it says about defaults is true."""

import re
from pathlib import Path

import pytest

import polyfed
from polyfed.config import experiment, read_experiment
from polyfed.records import RunFolder
from polyfed.starter import starter
from tests.shell import Shell, is_one_sentence


def test_the_file_runs_as_it_is(shell: Shell, tmp_path: Path) -> None:
    assert shell("init", "experiment.yaml").output == "`polyfed run experiment.yaml` runs it.\n"
    smaller = ("--models", "cnn5", "--clients", "2", "--rounds", "1", "--device", "cpu")
    ended = shell("run", "experiment.yaml", *smaller, "-q", "--out", "run")
    assert ended.status == 0, ended.error
    assert RunFolder.open(tmp_path / "run").finished
    assert read_experiment(tmp_path / "experiment.yaml") == experiment(method="fedproto")


@pytest.mark.parametrize("method", list(polyfed.METHODS))
def test_every_commented_setting_has_its_default(tmp_path: Path, method: str) -> None:
    """Switching all of them on changes nothing."""
    text, count = re.subn(r"^( *)#(\w+: )", r"\1\2", starter(method), flags=re.M)
    (tmp_path / "all.yaml").write_text(text)
    assert count > 30
    assert read_experiment(tmp_path / "all.yaml") == experiment(method=method)
    assert max(len(line) for line in text.splitlines()) <= 80


def test_nothing_is_overwritten_and_other_files_are_refused(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    for arguments, words in (
        (("mine.yaml",), "'mine.yaml' exists, and init overwrites nothing"),
        (("experiment.txt",), "'experiment.txt' must end in .yaml"),
        (("missing/x.yaml",), "can't write 'missing/x.yaml'"),
        (("new.yaml", "--method", "fedprot"), "did you mean 'fedproto'?"),
    ):
        ended = shell("init", *arguments)
        assert ended.status == 2 and words in ended.error and is_one_sentence(ended.error)
    assert (tmp_path / "mine.yaml").read_text() == "mine" and not (tmp_path / "new.yaml").exists()
