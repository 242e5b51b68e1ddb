"""What a report shows, in its order: sections with figures, each with one sentence on what to see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from html import escape
from typing import Any

import pandas as pd

from polyfed.errors import InputError
from polyfed.metrics import FURTHER, TITLES
from polyfed.records.rows import MEMBER
from polyfed.report import figures, html, learned
from polyfed.report.about import about_runs, traffic
from polyfed.report.data import X_AXES, Material, Run

MOST_CELLS = 20_000
"""A figure of more cells or points would make the page slow."""
MOST_LOADED = 4
"""Runs whose data and networks are loaded for one report: each takes a while."""
MOST_DISTANCES = 8
MORE = {f"{metric}_final": f"{TITLES[metric]} (%)" for metric in FURTHER} | {"largest_class": "largest class (%)"}
"""Columns of clients.csv for runs where accuracy says little, and their titles."""


@dataclass(frozen=True)
class Figure:
    """A figure with what to see in it, and its numbers as a table for those who can't see it."""

    name: str
    """The name of its file."""
    title: str
    sentence: str
    chart: Any
    numbers: pd.DataFrame
    by_method: bool = False
    """Whether methods in it can be switched off."""
    wide: bool = False
    """Whether it needs both columns of a paper."""


@dataclass(frozen=True)
class Section:
    """A part of the page: figures, with HTML before and after them."""

    title: str
    before: str = ""
    figures: Sequence[Figure] = ()
    after: str = ""


@dataclass
class Parts:
    """Figures of a section, and sentences on those that can't be drawn."""

    figures: list[Figure] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Inside, what can't be drawn because files are missing becomes a sentence."""
        try:
            yield
        except InputError as error:
            self.missing.append(f"Not drawn, {what}: {error}")


def sections(material: Material, *, trust: bool = False) -> Iterator[Section]:
    """All sections of a report."""
    yield Section("Summary", _summary(material))
    yield _learning(material)
    yield _clients(material)
    yield _classes(material)
    yield _trade_off(material)
    yield _representations(material, trust=trust)
    yield Section("What travelled", traffic(material))
    yield Section("Settings and notes", about_runs(material))


def _summary(material: Material) -> str:
    blocks = []
    for source in material.sources:
        blocks += [f"<h3>{escape(source.title)}</h3>"] if len(material.sources) > 1 else []
        blocks += [
            html.table(sheet.header, sheet.rows, sheet.title[:1].upper() + sheet.title[1:], bold=sheet.bold)
            for sheet in source.sheets
        ]
        blocks.append(html.listed(source.remarks))
    running = [run for run in material.runs if not run.folder.finished]
    if running:
        rows = [[run.name, run.seed, *_progress(run)] for run in running]
        header = ["run", "seed", "rounds evaluated", "rounds planned", "latest accuracy (%)"]
        blocks.append(html.table(header, rows, "Runs that have not ended"))
    return "".join(blocks)


def _progress(run: Run) -> tuple[int, int | None, float]:
    latest = 100 * float(run.curve["accuracy"].iloc[-1]) if len(run.curve) else float("nan")
    return int(run.curve["round"].iloc[-1]) if len(run.curve) else 0, run.folder.planned_rounds, latest


def _learning(material: Material) -> Section:
    frame, parts = material.curves.dropna(subset="accuracy"), Parts()
    if frame.empty:
        words = "There is no accuracy yet: no round has been evaluated on test samples."
        return Section("Accuracy over rounds and costs", html.paragraph(words))
    last = frame.groupby("method", sort=False).tail(1)
    highest, seeds = round(last["accuracy"].max(), 2), int(frame["seeds"].max())
    leaders = last.loc[last["accuracy"].round(2) == highest, "method"]
    best = f"Highest at the end: {', '.join(leaders)} with {highest:.2f} %"
    best = best if len(material.names) > 1 else f"The last accuracy is {highest:.2f} %"
    band = f"; lines are means over up to {seeds} seeds, bands one standard deviation" if seeds > 1 else "; one seed"
    sentences = {
        "round": f"{best}{band}.",
        "floats": "The further left a line rises, the less had to be sent for the same accuracy.",
        "flops": "The further left a line rises, the less the clients had to compute for the same accuracy.",
        "simulated_seconds": "The further left a line rises, the sooner the accuracy is reached on the given devices.",
    }
    for x, over in X_AXES.items():
        if x not in frame or not (frame[x] > 0).any():
            parts.missing.append(_why_not(x))
            continue
        drawn = figures.curves(frame, x, methods=material.names)
        silent = sorted(set(material.names) - set(frame.loc[frame[x] > 0, "method"]))
        without = f" Not shown, as they send nothing: {', '.join(silent)}." if silent and x == "floats" else ""
        numbers = _thinned(frame)[["method", "round", *([] if x == "round" else [x]), "accuracy", "low", "high"]]
        name = f"accuracy-by-{x.replace('_', '-')}"
        title = f"Accuracy over {'rounds' if x == 'round' else over}"
        parts.figures.append(Figure(name, title, sentences[x] + without, drawn, numbers, True))
    return Section("Accuracy over rounds and costs", "", parts.figures, html.listed(parts.missing))


def _why_not(x: str) -> str:
    reasons = {
        "floats": "Nothing was sent, so there is no figure over floats.",
        "simulated_seconds": "Time was not simulated (--devices), so there is no figure over simulated time.",
    }
    return reasons.get(x, f"There is no figure over {X_AXES[x]}: nothing is recorded.")


def _thinned(frame: pd.DataFrame, most: int = 10) -> pd.DataFrame:
    """About ten rounds of each method, the last among them."""
    rounds = sorted(frame["round"].unique(), reverse=True)
    return frame[frame["round"].isin(rounds[:: max(1, len(rounds) // most)])]


def _clients(material: Material) -> Section:
    frame, parts = material.clients.dropna(subset="accuracy"), Parts()
    if frame.empty:
        words = "There are no accuracies of clients: they need test samples and are written when a run ends."
        return Section("Clients", html.paragraph(words))
    table = frame.groupby("method", sort=False).agg(
        clients=("accuracy", "size"),
        mean=("accuracy", "mean"),
        median=("accuracy", "median"),
        worst=("accuracy", "min"),
    )
    worse = frame.dropna(subset="gain").groupby("method", sort=False)["gain"].agg(lambda gain: 100 * (gain < 0).mean())
    deciles = frame.groupby(["method", "seed"], sort=False)["accuracy"].agg(_worst_decile).groupby("method").mean()
    table = table.assign(**{"worst decile": deciles, "worse than alone (%)": worse}).round(2).reset_index()
    parts.figures.append(
        Figure(
            "clients", "Accuracy of every client",
            "Ticks far left are clients that do badly whatever the mean (the dot); the bar is the middle half.",
            figures.clients(frame, methods=material.names), table, True,
        )
    )  # fmt: skip
    own = material.client_curves
    if len(own) and len(own) <= MOST_CELLS:
        words = "A line that falls is a client that the last rounds harmed; point at one to see whose it is."
        chart = figures.client_curves(own, methods=material.names)
        parts.figures.append(Figure("client-curves", "Each client over rounds", words, chart, _thinned(own), True))
    else:
        parts.missing.append(
            "There are no curves of single clients: a run records them with 'confusion: every' only."
            if own.empty
            else "There are no curves of single clients: there would be too many points for a page."
        )
    member = {MEMBER: "member"} if MEMBER in frame else {}
    columns = {"method": "method", "seed": "seed", "client": "client", **member, "architecture": "network",
               "train_samples": "training samples", "test_samples": "test samples", "classes": "classes",
               "accuracy": "accuracy (%)", "gain": "minus alone"}  # fmt: skip
    if any(run.outcome and run.outcome.tells_more for run in material.runs):
        frame = frame.assign(**{name: 100 * frame[name] for name in MORE if name in frame})
        columns |= {name: title for name, title in MORE.items() if name in frame and frame[name].notna().any()}
    every = frame[list(columns)].rename(columns=columns).round(2)
    listing = html.frame(every, "Every client after the last round; a heading sorts.", sortable=True, most=1000)
    return Section("Clients", "", parts.figures, html.listed(parts.missing) + html.details("All clients", listing))


def _worst_decile(accuracies: pd.Series) -> float:
    known = accuracies.dropna().sort_values()
    return float(known.iloc[: max(1, len(known) // 10)].mean())


def _classes(material: Material) -> Section:
    held, scores, pairs = material.holdings, material.class_accuracies, material.confusions
    if held.empty:
        words = "No counts by class are recorded: they are written when a run ends, unless 'confusion' is none."
        return Section("Data and classes", html.paragraph(words))
    parts = Parts()
    few = held[held["client"].isin(sorted(held["client"].unique())[:60])]
    cut = f" The first 60 of {held['client'].nunique()} clients." if len(few) < len(held) else ""
    seed = next(run.seed for run in material.first_runs if len(run.confusion))
    words = f"A column with few bubbles is a client with few classes. Size: test samples, of seed {seed}.{cut}"
    parts.figures.append(Figure("data", "Who holds which classes", words, figures.holdings(few), few))
    words = "A pale column is a class that is hard for all methods, a pale cell one that a method neglects."
    shown = scores[["method", "class", "samples", "accuracy"]].round({"accuracy": 2})
    chart = figures.class_accuracies(scores, methods=material.names)
    parts.figures.append(Figure("classes", "Accuracy by class", words, chart, shown, True))
    if len(pairs) > MOST_CELLS:
        pairs = pairs[pairs["client"] == "all"]
        parts.missing.append("Confusion is of all clients together: each client's own would be too much for a page.")
    words = "Dark cells off the diagonal are classes that are mistaken for each other; choose a method and a client."
    together = pairs[pairs["client"] == "all"].drop(columns="client").round({"share": 2})
    parts.figures.append(Figure("confusion", "What is predicted as what", words, figures.confusion(pairs), together))
    return Section("Data and classes", "", parts.figures, html.listed(parts.missing))


def _trade_off(material: Material) -> Section:
    frame = material.trade_off.dropna(subset="accuracy")
    title = "Accuracy, communication and computation"
    if frame.empty:
        words = "There is nothing to weigh: accuracies and totals are written when a run ends."
        return Section(title, html.paragraph(words))
    words = "Up and left is better: more accuracy for fewer floats; a large bubble means much computation by clients."
    chart = figures.trade_off(frame, methods=material.names)
    return Section(title, "", [Figure("trade-off", "What accuracy costs", words, chart, frame, True, True)])


def _representations(material: Material, *, trust: bool) -> Section:
    parts = Parts()
    _add_prototypes(material, parts)
    loaded = [run for run in material.first_runs if run.outcome]
    if len(loaded) > MOST_LOADED:
        parts.missing.append(
            f"Features and enhanced images are drawn for up to {MOST_LOADED} methods, because their data and networks "
            f"have to be loaded; here there are {len(loaded)}. Name fewer runs to see them."
        )
        loaded = []
    for run in loaded:
        with parts.attempt(f"features of {run.name}"):
            _add_loaded(run, parts, trust=trust)
    return Section("Representations", "", parts.figures, html.listed(list(dict.fromkeys(parts.missing))))


def _add_prototypes(material: Material, parts: Parts) -> None:
    found = []
    for run in material.first_runs:
        if run.outcome and run.method in ("fedproto", "fedtgp", "fedorgp", "protonorm"):
            with parts.attempt(f"prototypes of {run.name}"):
                found.append(learned.prototypes(run))
    frames = [frame for frame in found if frame is not None and len(frame) > 1]
    if not frames:
        return
    every = pd.concat(frames)
    nearest = every.drop_duplicates(["method", "class"])[["method", "class", "margin"]]
    words = "Low dots are classes whose global prototype has another one close to it, so they are easy to confuse."
    chart = figures.margins(nearest, methods=material.names)
    parts.figures.append(Figure("margins", "Margins of global prototypes", words, chart, nearest, True))
    for frame in frames[:MOST_DISTANCES]:
        name = frame["method"].iloc[0]
        words = "Pale cells off the diagonal are pairs of classes whose prototypes are close."
        table = frame[["class", "other", "distance"]]
        title = f"Distances of global prototypes, {name}"
        parts.figures.append(Figure(f"distances-{_file(name)}", title, words, figures.distances(frame), table))


def _add_loaded(run: Run, parts: Parts, *, trust: bool) -> None:
    result = learned.load(run, trust=trust)
    points = learned.feature_points(result)
    words = "Colours in separate clumps are classes that the features tell apart (t-SNE of test samples)."
    table = points.groupby(["class", "architecture"], as_index=False).size().rename(columns={"size": "points"})
    name = _file(run.name)
    parts.figures.append(Figure(f"features-{name}", f"Features, {run.name}", words, figures.features(points), table))
    images = learned.proxy_pictures(result)
    if images is not None:
        words = "Below is what the proxies make of client 0's test images; each picture has its own scale."
        table = images[["kind", "sample"]]
        title = f"Original and enhanced images, {run.name}"
        parts.figures.append(Figure(f"images-{name}", title, words, figures.pictures(images), table))


def _file(name: str) -> str:
    """A name for a file and for an element of the page; one that had to be changed ends with a hash of what it was.

    >>> _file("fedproto"), _file("fedproto, method.weight=0.5")
    ('fedproto', 'fedproto-method.weight-0.5-2e98')
    """
    plain = "-".join("".join(letter if letter.isalnum() or letter in ".-" else " " for letter in name).split())
    return plain if plain == name else f"{plain}-{blake2b(name.encode(), digest_size=2).hexdigest()}"
