"""Methods of other packages: by address, by entry point, and the example of CONTRIBUTING.md as it is printed."""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import polyfed
from polyfed import methods, registry
from polyfed.methods.base import Method
from tests import support
from tests.stopping import StopAfterTwo

ROOT = Path(__file__).parents[2]
ADDRESS = "feature_length_of_someone:FeatureLength"


def example(title: str) -> str:
    """The first block of Python in a section of CONTRIBUTING.md."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split(f"\n## {title}\n")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """CONTRIBUTING's method as a module of another package."""
    (tmp_path / "feature_length_of_someone.py").write_text(example("A method"))
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(polyfed.METHODS)
    yield tmp_path
    for name in set(polyfed.METHODS) - known:
        del polyfed.METHODS[name]
    sys.modules.pop("feature_length_of_someone", None)


def test_the_example_runs_by_its_address(elsewhere: Path) -> None:
    own = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    result = polyfed.run({"name": ADDRESS, "weight": 0.5}, **support.DEFAULTS, **own, out=elsewhere / "run")
    assert result.summary["method"] == "feature-length"
    assert result.rounds.upload_floats.tolist() == [8, 8]  # one number for each of two classes of four clients
    assert result.folder.read_config(trust=True).method == {"name": ADDRESS, "weight": 0.5}


def test_a_method_that_a_file_names_is_imported_only_if_trusted(elsewhere: Path) -> None:
    own = {"data": support.tiny_dataset(), "models": [support.Wide]}
    settings = {**support.DEFAULTS, "rounds": 3}
    with pytest.raises(
        polyfed.RunError, match=r"stopped after round 2 of 3; continue with `polyfed resume .*run --trust`"
    ):
        polyfed.run(ADDRESS, **settings, **own, out=elsewhere / "run", watcher=StopAfterTwo())
    del polyfed.METHODS[ADDRESS]
    sys.modules.pop("feature_length_of_someone")
    with pytest.raises(polyfed.InputError, match=f"the method '{ADDRESS}' is code that would be run: .*--trust"):
        polyfed.resume(elsewhere / "run", **own)
    assert "feature_length_of_someone" not in sys.modules
    assert len(polyfed.resume(elsewhere / "run", **own, trust=True).rounds) == 3


def test_another_package_may_offer_methods(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("lengthy", ADDRESS, "polyfed.methods")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    assert issubclass(methods.find_method("lengthy"), Method)
    with pytest.raises(polyfed.InputError, match="did you mean 'lengthy'"):
        methods.find_method("lengty")


@pytest.mark.parametrize("address", ["tests.support:Wide", "tests.support:tiny_dataset"])
def test_what_is_no_method_is_refused(address: str) -> None:
    with pytest.raises(polyfed.InputError, match=f"'{address}' is not a method: .*subclass of polyfed.Method"):
        methods.find_method(address)
