"""The page of a report: valid, complete, and nothing in it comes from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from polyfed import report
from polyfed.api import run
from polyfed.errors import InputError
from polyfed.methods import METHODS
from polyfed.records import RunFolder
from polyfed.report import figures, html, learned, looks
from tests.report.conftest import unfinished
from tests.shell import Shell
from tests.support import DEFAULTS, Narrow, Wide, tiny_dataset

pytest.importorskip("altair", reason="reports need the extra polyfed[report]")
pytest.importorskip("vl_convert", reason="reports need the extra polyfed[report]")

VOID = {"meta", "link", "input", "br"}
FIGURES = {
    "accuracy-by-round", "accuracy-by-floats", "accuracy-by-flops", "accuracy-by-simulated-seconds", "clients",
    "client-curves", "data", "classes", "confusion", "trade-off", "margins", "distances-fedproto",
}  # fmt: skip


class Page(HTMLParser):
    """What is in a page: charts, specifications, texts of cells, and tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.charts: set[str] = set()
        self.specs: dict[str, str] = {}
        self.cells: list[str] = []
        self.loads: list[str] = []
        self._spec = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.loads += [f"{name}={given[name]}" for name in ("src", "href", "action", "data") if given.get(name)]
        if given.get("class") == "chart":
            self.charts.add((given["id"] or "").removeprefix("figure-"))
        self._spec = (given.get("id") or "") if given.get("type") == "application/json" else ""
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect",):
            assert self.open.pop() == tag
        self._spec = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Elements of SVG that close themselves."""

    def handle_data(self, data: str) -> None:
        if self._spec:
            self.specs[self._spec.removeprefix("figure-").removesuffix("-spec")] = data
        elif self.open[-1:] != ["script"] and self.cells and {"td", "th"} & set(self.open):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def text(four: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.write_report(report.read(*four), path)
    return path.read_text()


def test_page_is_complete_and_valid(text: str) -> None:
    page = Page(text)
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    assert page.charts == set(page.specs) == FIGURES
    assert len(text) < 3_000_000


def test_every_figure_has_data_and_words(text: str) -> None:
    for spec in map(json.loads, Page(text).specs.values()):
        rows = [row for rows in spec["datasets"].values() for row in rows]
        assert rows and spec["description"].endswith(".")


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    assert all(load.startswith(("href=#", "href=data:")) for load in Page(text).loads)
    assert "default-src 'none'" in text and not re.search(r"@import|url\(", text.partition("</style>")[0])
    assert not any("http" in spec for spec in Page(text).specs.values())


def test_tables_have_the_numbers_of_the_runs(text: str, four: list[Path]) -> None:
    cells = Page(text).cells
    finals = {path.name: RunFolder.open(path).summary()["accuracy_final"] for path in four}
    for method in ("standalone", "fedproto"):
        both = pd.Series([100 * finals[f"{method}-{seed}"] for seed in (0, 1)])
        assert f"{both.mean():.2f} ± {both.std():.2f}" in cells
    assert METHODS["fedproto"].reveals in cells and "prototypes" in cells


def test_messages_are_those_of_the_second_round(text: str) -> None:
    """Two of four classes with six features: 2×6 floats and two labels go up; all four prototypes come down."""
    cells = Page(text).cells
    place = cells.index("prototypes", cells.index("shape"))
    assert cells[place : place + 4] == ["prototypes", "down", "4×6", "96"]
    place = cells.index("prototypes", place + 1)
    assert cells[place : place + 8] == ["prototypes", "up", "2×6", "48", "labels", "up", "2", "16"]


def test_what_a_run_says_is_no_code() -> None:
    assert "<b>" not in html.table(["<b>"], [["<b>"]], "<b>") and "<" not in html.data({"a": "</script><b>"})


def test_data_from_python_leave_features_out_with_a_sentence(text: str) -> None:
    assert "Not drawn, features of fedproto: " in text


def test_run_in_progress_is_reported(four: list[Path], tmp_path: Path) -> None:
    report.write_report(report.read(unfinished(four[0], tmp_path)), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Runs that have not ended" in text and "polyfed resume" in text
    assert "accuracy-by-round" in Page(text).charts and "clients" not in Page(text).charts


def test_run_without_test_samples_is_reported(tmp_path: Path) -> None:
    settings = DEFAULTS | {"split": "8:2:0", "confusion": "none"}
    run("fedproto", data=tiny_dataset(), models=[Wide, Narrow], out=tmp_path / "run", progress=False, **settings)
    report.write_report(report.read(tmp_path / "run"), tmp_path / "page.html")
    assert Page((tmp_path / "page.html").read_text()).charts == {"margins", "distances-fedproto"}


def test_features_of_different_sizes_are_not_drawn() -> None:
    people = SimpleNamespace(clients=[0, 1], data=[SimpleNamespace(test=range(9))] * 2)
    result = SimpleNamespace(population=people, model=lambda client: SimpleNamespace(feature_size=client + 5))
    with pytest.raises(InputError, match=r"different numbers of features \(5, 6\)"):
        learned.feature_points(result)  # type: ignore[arg-type]


def test_refused_replies_and_notes_are_listed(four: list[Path], tmp_path: Path) -> None:
    running = unfinished(four[0], tmp_path)
    lines = [
        {"event": "note", "round": 2, "note": "round 2 continues without client 3: <too large>", "client": 3},
        {"event": "note", "round": 2, "note": "a remark"},
    ]
    with (running / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    report.write_report(report.read(running), tmp_path / "page.html")
    cells = Page((tmp_path / "page.html").read_text()).cells
    assert "round 2 continues without client 3: <too large>" in cells and "a remark" in cells


def test_figures_for_a_paper(four: list[Path], tmp_path: Path) -> None:
    """Every figure three times, a column wide, with its fonts; and tables."""
    report.write_figures(report.read(*four), tmp_path)
    stems = {path.stem for path in tmp_path.glob("*.svg")}
    assert (
        stems == FIGURES == {path.stem for path in tmp_path.glob("*.pdf")} == {p.stem for p in tmp_path.glob("*.png")}
    )
    pdf = (tmp_path / "clients.pdf").read_bytes()
    assert b"/FontFile" in pdf and f"/MediaBox [0 0 {looks.COLUMN} ".encode() in pdf
    assert r"\toprule" in (tmp_path / "tables.tex").read_text()


def test_features_and_enhanced_images_are_drawn_where_data_and_models_are_there(tmp_path: Path) -> None:
    run("pfedes", models="cnn5", clients=2, rounds=1, batch_size=64, out=tmp_path / "run", progress=False)
    report.write_report(report.read(tmp_path / "run"), tmp_path / "page.html")
    specs = Page((tmp_path / "page.html").read_text()).specs
    assert {"features-pfedes", "images-pfedes"} <= set(specs)
    images = next(iter(json.loads(specs["images-pfedes"])["datasets"].values()))
    assert {row["kind"] for row in images} == {"original", "own proxy", "global proxy"}
    assert all(row["url"].startswith("data:image/png;base64,") for row in images)


def test_colours_do_not_depend_on_which_methods_a_frame_has() -> None:
    assert looks.scales(["a", "b"])["colour"].to_dict()["range"][1] == looks.COLOURS[1]
    frame = pd.DataFrame({"method": ["b"], "class": [0], "margin": [1.0]})
    drawn = figures.margins(frame, methods=["a", "b"]).to_dict()["encoding"]["color"]
    assert drawn["scale"]["domain"] == ["a", "b"] and drawn["legend"]["values"] == ["b"]


def test_names_do_not_cover_each_other() -> None:
    """Two methods at the same place: the second name goes to another side."""
    frame = pd.DataFrame({"method": ["one", "two"], "floats": [1e6, 1e6], "accuracy": [50.0, 50.0]})
    first, second = figures._sides(frame, [-1500, 3e6], [49, 51])
    assert first != second


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_says_what_its_messages_reveal(method: str) -> None:
    assert METHODS[method].reveals.endswith(".")


def test_command_writes_page_and_figures(shell: Shell, four: list[Path], tmp_path: Path) -> None:
    result = shell("report", str(four[0]), "-o", "page.html", "--figures", "figures")
    assert result.status == 0 and (tmp_path / "page.html").is_file() and (tmp_path / "figures" / "data.pdf").is_file()
    for arguments, words in (
        (["nowhere"], "there is no folder 'nowhere'"),
        ([str(four[0]), "-o", "no/such/folder.html"], "can't write"),
        ([str(four[0]), "-o", " "], "--out is empty"),
        ([str(four[0]), "--baseline", "fedavg"], "the baseline 'fedavg' is not among the runs"),
    ):
        result = shell("report", *arguments)
        assert result.status == 2 and words in result.error
