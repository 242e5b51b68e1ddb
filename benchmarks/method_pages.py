"""Put the numbers and curves of a comparison into the methods' pages, so that nobody copies them by hand.

    python benchmarks/method_pages.py runs/cifar10

Rewrites the section "A measured run" of docs/methods/METHOD.md for every method of the comparison, and draws
docs/pictures/curve-METHOD.png and docs/pictures/cifar10-differences.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

DOCS = Path(__file__).parent.parent / "docs"
TITLE = "## A measured run\n"
BLUE, GREY = "#0072B2", "#555555"


def section(row: pd.Series, seeds: int) -> str:
    """The section of one method."""
    alone = row.method == "standalone"
    columns = ["final accuracy", "at the round best on validation"]
    values = [
        f"{100 * row.accuracy_final_mean:.2f} ± {100 * row.accuracy_final_std:.2f}",
        f"{100 * row.accuracy_at_best_validation_mean:.2f} ± {100 * row.accuracy_at_best_validation_std:.2f}",
    ]
    if not alone:
        columns += ["final minus Standalone [95 %]", "clients worse off than alone"]
        low, high = 100 * row.difference_low, 100 * row.difference_high
        values += [f"{100 * row.difference_mean:+.2f} [{low:+.2f}, {high:+.2f}]", f"{100 * row.clients_worse:.0f} %"]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), values))
    picture = "" if alone else f"\n![{row.method} against Standalone](../pictures/curve-{row.method}.png)\n"
    return (
        f"{TITLE}\nCIFAR-10, ten clients with two classes each, the five CNNs, batch 64, one epoch a round, plain SGD "
        f"with learning rate\n0.01, 30 rounds, {seeds} seeds, default options, nothing tuned, on an H200. In percent; "
        f"the difference is paired by seed:\n\n{table}\n{picture}\n"
        "[All methods in one table, with the command and what may be concluded](../learning.md).\n"
    )


def rewrite(page: Path, text: str) -> None:
    """Replace the section, which ends the page or comes before another one."""
    content = page.read_text()
    before, _, rest = content.partition(TITLE)
    _, found, after = rest.partition("\n## ")
    page.write_text(before + text + (f"\n## {after}" if found else ""))


def draw_curve(curves: pd.DataFrame, method: str) -> None:
    """A method's accuracy over rounds beside Standalone's, with bands of one standard deviation over seeds."""
    figure = Figure(figsize=(5, 3), dpi=90, layout="constrained")
    axes = figure.subplots()
    for name, colour, style in (("standalone", GREY, "--"), (method, BLUE, "-")):
        own = curves[curves.method == name]
        middle, around = 100 * own.accuracy, 100 * own["std"]
        axes.plot(own["round"], middle, style, color=colour, label=name)
        axes.fill_between(own["round"], middle - around, middle + around, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy on test samples (%)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(DOCS / "pictures" / f"curve-{method}.png")


def draw_differences(table: pd.DataFrame) -> None:
    """Every method's difference from Standalone with its interval."""
    rows = table[table.method != "standalone"].sort_values("difference_mean")
    figure = Figure(figsize=(6, 4), dpi=90, layout="constrained")
    axes = figure.subplots()
    middle = 100 * rows.difference_mean
    around = [middle - 100 * rows.difference_low, 100 * rows.difference_high - middle]
    axes.errorbar(middle, rows.method, xerr=around, fmt="o", color=BLUE, ecolor=BLUE, capsize=3)
    axes.axvline(0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("points above Standalone in the last round, with 95 % interval (not corrected)", fontsize=9)
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(DOCS / "pictures" / "cifar10-differences.png")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    table, curves = pd.read_csv(folder / "comparison.csv"), pd.read_csv(folder / "curves.csv")
    for _, row in table.iterrows():
        rewrite(DOCS / "methods" / f"{row.method}.md", section(row, int(row.seeds)))
        if row.method != "standalone":
            draw_curve(curves, row.method)
    draw_differences(table)


if __name__ == "__main__":
    main()
