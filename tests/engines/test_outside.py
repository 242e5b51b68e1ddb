"""Engines of other packages: by address, by entry point, as a class, and the example of CONTRIBUTING.md."""

import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed import registry
from polyfed.cli.options import _annotation
from polyfed.config import read_experiment
from polyfed.engines import ENGINES, LocalEngine, SequentialEngine, new_engine
from polyfed.ranges import describe_range
from tests import support
from tests.methods.test_outside import example
from tests.stopping import StopAfterTwo

MODULE = "backwards_of_someone"
ADDRESS = f"{MODULE}:BackwardsEngine"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """CONTRIBUTING's engine as a module of another package."""
    (tmp_path / f"{MODULE}.py").write_text(example("An engine"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget() -> None:
    """As if the module had never been imported."""
    for name in set(ENGINES) - ENGINES.own:
        del ENGINES[name]
    sys.modules.pop(MODULE, None)


def run(out: Path, **settings: Any) -> polyfed.Result:
    own = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    return polyfed.run("fedproto", **{**support.DEFAULTS, **settings}, **own, out=out)


def resume(out: Path, settings: Mapping[str, Any] | None = None, **options: Any) -> polyfed.Result:
    own = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    return polyfed.resume(out, **own, settings=settings, **options)


def test_the_example_runs_by_its_address_and_agrees_with_sequential(elsewhere: Path) -> None:
    reference, own = run(elsewhere / "one"), run(elsewhere / "two", engine=ADDRESS)
    assert own.rounds.drop(columns="seconds").equals(reference.rounds.drop(columns="seconds"))
    assert own.folder.config.engine == ADDRESS
    assert [event["engine"] for event in own.folder.starts()] == ["backwards"]


def test_a_class_is_an_engine_by_its_name(elsewhere: Path) -> None:
    from backwards_of_someone import BackwardsEngine  # type: ignore[import-not-found]

    found = run(elsewhere / "run", engine=BackwardsEngine)
    assert found.folder.config.engine == "backwards"
    assert isinstance(new_engine("backwards", support.population("standalone")), BackwardsEngine)


def test_an_engine_of_the_command_line_knows_its_settings(elsewhere: Path) -> None:
    engine: Any = new_engine(ADDRESS, support.population("standalone"), polyfed.engines.EngineSettings(None, 12345))  # type: ignore[attr-defined]
    assert engine.store._budget == 12345


def stopped(out: Path, engine: Any) -> None:
    trust = " --trust" if engine == ADDRESS else ""
    with pytest.raises(polyfed.RunError, match=f"stopped after round 2 .*`polyfed resume {out}{trust}`"):
        run(out, engine=engine, rounds=3, watcher=StopAfterTwo())
    forget()


def test_an_engine_that_a_file_names_is_imported_only_if_trusted(elsewhere: Path) -> None:
    stopped(elsewhere / "run", ADDRESS)
    with pytest.raises(polyfed.InputError, match=f"names code that would be run, '{ADDRESS}': .*--trust"):
        resume(elsewhere / "run")
    with pytest.raises(polyfed.InputError, match=f"names code that would be run, '{ADDRESS}': .*--trust"):
        resume(elsewhere / "run", {"training": {"lr": 0.05}})
    assert MODULE not in sys.modules
    assert len(resume(elsewhere / "run", trust=True).rounds) == 3


def test_a_run_may_go_on_with_another_engine(elsewhere: Path) -> None:
    stopped(elsewhere / "run", ADDRESS)
    assert len(resume(elsewhere / "run", {"engine": "threads"}).rounds) == 3
    assert MODULE not in sys.modules
    assert polyfed.RunFolder.open(elsewhere / "run").config.engine == "threads"


def test_a_run_with_a_class_can_be_read_but_goes_on_only_with_an_engine_that_is_there(elsewhere: Path) -> None:
    from backwards_of_someone import BackwardsEngine

    stopped(elsewhere / "run", BackwardsEngine)
    assert polyfed.RunFolder.open(elsewhere / "run").config.engine == "backwards"
    with pytest.raises(polyfed.InputError, match="unknown engine 'backwards'"):
        resume(elsewhere / "run")
    assert len(resume(elsewhere / "run", {"engine": BackwardsEngine}).rounds) == 3


def test_an_option_of_the_method_does_not_make_a_files_code_trusted(elsewhere: Path) -> None:
    """The user typed a weight, not the method that it belongs to; and a method, not the engine beside it."""
    (elsewhere / "one.yaml").write_text(f"method: {{name: '{MODULE}:Method'}}")
    with pytest.raises(polyfed.InputError, match="the method .* is code that would be run"):
        read_experiment(elsewhere / "one.yaml", method={"weight": 1})
    (elsewhere / "two.yaml").write_text(f"method: fedproto\nengine: '{ADDRESS}'")
    read_experiment(elsewhere / "two.yaml", method="fedavg")
    assert MODULE not in sys.modules
    assert read_experiment(elsewhere / "two.yaml", engine=ADDRESS).engine == ADDRESS
    assert MODULE in sys.modules


def test_another_package_may_offer_engines(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("rueckwaerts", ADDRESS, "polyfed.engines"), EntryPoint("lost", "no.such:E", "polyfed.engines")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "polyfed.engines" else [])
    assert issubclass(ENGINES.find("rueckwaerts"), SequentialEngine)
    assert run(elsewhere / "run", engine="rueckwaerts").folder.config.engine == "rueckwaerts"
    with pytest.raises(polyfed.InputError, match="did you mean 'rueckwaerts'"):
        polyfed.experiment(method="fedproto", engine="rueckwarts")
    with pytest.raises(polyfed.InputError, match=r"the engine 'lost' \(no.such:E\) can't be imported"):
        polyfed.experiment(method="fedproto", engine="lost")


class Unnamed(polyfed.Engine):
    """Says nothing."""


class Auto(SequentialEngine):
    """Calls itself what is not a name."""

    name = "auto"


class Half(LocalEngine):
    """Can't train."""

    name = "half"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("tests.support:Wide", "'tests.support:Wide' is not an engine: it must be a subclass of polyfed.Engine"),
        ("tests.engines.test_outside:Half", "the engine Half is not complete: define evaluate, train in it"),
        ("no.such.module:Engine", "can't be imported"),
        (Unnamed, "the engine Unnamed has no name: give its class one, such as name = 'my-engine'"),
        (Auto, "the engine Auto is called 'auto', like one of polyfed's own: give its class another name"),
        (Half, "define evaluate, train in it"),
        (3, "engine is a value of type int, but must be a name, package.module:Class or a subclass of polyfed.Engine"),
    ],
)
def test_what_is_no_engine_is_refused_in_a_sentence(engine: Any, words: str) -> None:
    with pytest.raises(polyfed.InputError, match=words):
        polyfed.experiment(method="fedproto", engine=engine)


def test_help_and_docs_list_the_engines() -> None:
    words = "one of auto, sequential, threads, vectorized, ray, or package.module:Class"
    assert describe_range(polyfed.Experiment, "engine") == words
    assert words in _annotation("engine").__metadata__[0].help
    row = next(line for line in (Path("docs/configuration.md")).read_text().splitlines() if "| `engine` |" in line)
    assert row.split("|")[4].strip() == words.removeprefix("one of ").replace(", or ", ", ")


def test_an_engine_of_this_process_alone_is_not_found_elsewhere(elsewhere: Path) -> None:
    from backwards_of_someone import BackwardsEngine

    ENGINES.register(BackwardsEngine)
    assert [ENGINES.is_found_elsewhere(name) for name in ("auto", "ray", ADDRESS, "backwards")] == [True] * 3 + [False]
