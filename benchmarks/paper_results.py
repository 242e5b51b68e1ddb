"""Puts finished and unfinished runs into two small tables and a picture, to lay beside published numbers.

A run that has not reached its last round is taken as far as it came; the column `reached` says how far. One without
any evaluation is left out.

    python benchmarks/paper_results.py runs/cifar100-n100 runs/cifar100-n10 --out papers/results/cifar100

reads every run folder in the folders given, and writes OUT.csv (a row per run and rule of prediction), OUT-curves.csv
(accuracy over rounds) and, with --picture FOLDER, a PNG of the rule `classifier` for each setting there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
from curves import draw_one

from polyfed.records import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of run folders; their names name the settings")
    parser.add_argument("--out", type=Path, required=True, help="where the tables go, without their ending")
    parser.add_argument("--picture", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    found = [(folder.name, run) for folder in options.folders for run in sorted(folder.iterdir()) if run.is_dir()]
    runs = [(setting, run) for setting, run in found if len(RunFolder.open(run).evaluations())]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = pd.DataFrame([row for setting, run in runs for row in rows_of(setting, run)])
    rows.to_csv(options.out.with_name(f"{options.out.name}.csv"), index=False, float_format="%.5g")
    curves = pd.concat([curve_of(setting, run) for setting, run in runs])
    name = f"{options.out.name}-curves.csv"
    curves.to_csv(options.out.with_name(name), index=False, float_format="%.5g")
    if options.picture:
        drawn = curves[curves["rule"] == "classifier"].groupby(["setting", "method", "round"], sort=False)["test"]
        for setting, own in drawn.agg(accuracy="mean", std="std").reset_index().groupby("setting"):
            draw_one(own, options.picture / f"{setting}.png", str(setting))


def rows_of(setting: str, run: Path) -> list[dict[str, Any]]:
    """A row per rule of prediction: accuracy at the end, over the last ten evaluations, and at the best rounds."""
    folder = RunFolder.open(run)
    config, rows = folder.config, []
    for rule, own in tables(folder).items():
        rows.append(
            {
                "setting": setting, "method": config.method["name"], "seed": config.seed, "rule": rule,
                "rounds": config.rounds, "reached": own.index[-1],
                "final": own["test"].iloc[-1], "last_ten": own["test"].tail(10).mean(),
                "at_best_validation": at_best(own["validation"], own["test"]), "best_on_test": own["test"].max(),
                "origin": folder.origin(),
            }
        )  # fmt: skip
    return rows


def at_best(validation: pd.Series, test: pd.Series) -> float:
    """Accuracy on test samples at the round best on validation samples, if there are any."""
    known = validation.dropna()
    return float(test[known.idxmax()]) if len(known) else float("nan")


def curve_of(setting: str, run: Path) -> pd.DataFrame:
    """Accuracy over rounds by every rule."""
    folder = RunFolder.open(run)
    names = {"setting": setting, "method": folder.config.method["name"], "seed": folder.config.seed}
    parts = [own.reset_index().assign(rule=rule, **names) for rule, own in tables(folder).items()]
    return pd.concat(parts)[[*names, "rule", "round", "test", "validation"]]


def tables(folder: RunFolder) -> dict[str, pd.DataFrame]:
    """Accuracy on test and validation samples over rounds, by rule; the method's own rule comes first."""
    evaluations = folder.evaluations().drop_duplicates(["round", "part", "rule"], keep="last")
    return {
        rule: evaluations[evaluations["rule"] == rule].pivot(index="round", columns="part", values="accuracy_mean")
        for rule in evaluations["rule"].unique()
    }


if __name__ == "__main__":
    main()
