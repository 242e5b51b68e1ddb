"""Two versions of polyfed: do they give the same numbers, bit by bit?

Every method trains on every engine with small networks and little data, once with this checkout's code and once with
that of another checkout, each in a process of its own. What the runs leave behind is compared: `rounds.csv` (without
`seconds`), `evaluations.csv`, `clients.csv`, every client's model, and the server's state where both versions write
it. Prints one line per case; the exit status is 1 if anything differs or fails, and 0 if all is equal.

    git worktree add /tmp/before main~1
    python benchmarks/compare_versions.py /tmp/before [--methods fedproto,pfedes] [--engines sequential] [--keep DIR]
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

HERE = Path(__file__).resolve().parents[1]
METHODS = (
    "standalone", "fedavg", "lg-fedavg", "fedproto", "fedtgp", "dc-pfl", "fml", "fedapen", "fedkd", "fedmrl", "fedgh",
    "fedgen", "fedclassavg", "fd", "fedssa", "pfedes", "fedorgp", "protonorm", "fedre", "pfedafm", "fedl2g",
)  # fmt: skip
ENGINES = ("sequential", "threads", "vectorized")
TABLES = {"rounds.csv": ("seconds",), "evaluations.csv": (), "clients.csv": ()}
"""What is compared of a run's tables, and the columns that may differ."""
FAILED = "failed.txt"


class Plain(nn.Module):
    """Linear layers only: the vectorized engine stacks it."""

    hidden = 12

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = int(torch.tensor(input_shape).prod())
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(size, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 6), nn.ReLU()
        )
        self.out = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


class PlainToo(Plain):
    hidden = 8


class Normed(nn.Module):
    """Convolution, batch norm and dropout: clients train one at a time on every engine."""

    channels = 4

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(input_shape[0], self.channels, 3), nn.BatchNorm2d(self.channels), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(4 * self.channels, 6), nn.ReLU(),
        )  # fmt: skip
        self.out = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


class NormedToo(Normed):
    channels = 3


SETTINGS: dict[str, tuple[tuple[type[nn.Module], ...], dict[str, Any]]] = {
    "plain": ((Plain, PlainToo), {"classes_per_client": 2, "training": {"batch_size": 8, "lr": 0.1}}),
    "normed": (
        (Normed, NormedToo),
        {
            "participation": 0.6, "partition": "iid", "start": "client", "evaluate": "after-download",
            "training": {"batch_size": 5, "lr": 0.05, "epochs": 2, "momentum": 0.9, "augment": True},
        },
    ),
}  # fmt: skip
"""By name, networks and settings: together they use much of what a run can draw and do.

With batches of five, FedAPEN's clients have a last batch of one sample, which batch norm can't train on.
"""


@dataclass(frozen=True)
class Case:
    """One run."""

    method: str
    engine: str
    networks: str

    @property
    def folder(self) -> str:
        return f"{self.method}-{self.engine}-{self.networks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout of polyfed, such as a git worktree")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--networks", default=",".join(SETTINGS), help="plain, normed or both")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs; without it they are deleted")
    parser.add_argument("--run-into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = (options.methods.split(","), options.engines.split(","), options.networks.split(","))
    cases = [Case(*each) for each in product(*names)]
    if options.run_into is not None:
        run_all(options.other, cases, options.device, options.run_into)
        return
    if not (options.other / "polyfed").is_dir():
        parser.error(f"'{options.other}' is no checkout of polyfed: it has no folder 'polyfed'.")
    with tempfile.TemporaryDirectory(prefix="polyfed-versions-") as temporary:
        root = (options.keep or Path(temporary)).resolve()
        checkouts = {"this": HERE, "other": options.other.resolve()}
        train_both(checkouts, root, options)
        sys.exit(int(not report(cases, root)))


def train_both(checkouts: dict[str, Path], root: Path, options: argparse.Namespace) -> None:
    """All runs of both versions, side by side, each version with its own code first on Python's path."""
    chosen = [f"--{name}={getattr(options, name)}" for name in ("methods", "engines", "networks", "device")]
    processes = []
    for side, checkout in checkouts.items():
        (root / side).mkdir(parents=True)
        command = [sys.executable, str(Path(__file__).resolve()), str(checkout), *chosen, f"--run-into={root / side}"]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        processes.append(subprocess.Popen(command, cwd=root / side, env=environment))
    if any(status != 0 for status in [process.wait() for process in processes]):
        sys.exit("one of the versions could not run its cases; what it said is above.")


def run_all(checkout: Path, cases: list[Case], device: str, root: Path) -> None:
    """Run the cases with the code of one checkout; a case that fails leaves its error behind."""
    import polyfed

    if not Path(polyfed.__file__).resolve().is_relative_to(checkout.resolve()):
        sys.exit(f"'{checkout}' was asked for, but Python imports polyfed from '{polyfed.__file__}'.")
    torch.set_num_threads(1)
    data = dataset()
    for case in cases:
        models, settings = SETTINGS[case.networks]
        chosen = list(models[:1] if case.method == "fedavg" else models)  # its clients have one network
        out = root / case.folder
        try:
            polyfed.run(
                case.method, data=data, models=chosen, out=out, clients=5, rounds=3, seed=4, split="6:2:2",
                engine=case.engine, device=device, **settings,
            )  # fmt: skip
        except Exception as error:
            out.mkdir(exist_ok=True)
            (out / FAILED).write_text(f"{type(error).__name__}: {error}")


def dataset() -> Any:
    """Noisy images of four classes, each with its bright corner; no class has as many samples as another."""
    import polyfed

    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(4).repeat_interleave(torch.tensor([31, 34, 37, 40]))
    images = torch.randint(0, 120, (len(labels), 1, 6, 6), generator=generator, dtype=torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, row * 3 : row * 3 + 3, column * 3 : column * 3 + 3] += 130
    return polyfed.Dataset("corners", images, labels, 4, (0.5,), (0.25,))


def report(cases: list[Case], root: Path) -> bool:
    """Print a line per case; whether all are equal."""
    different = 0
    for case in cases:
        found = list(differences(root / "this" / case.folder, root / "other" / case.folder))
        different += bool(found)
        print(f"{case.method:12s} {case.engine:11s} {case.networks:7s} {'; '.join(found) or 'equal'}")
    print(f"{len(cases)} cases, {len(cases) - different} equal, {different} different (this version → the other)")
    return different == 0


def differences(this: Path, other: Path) -> Iterator[str]:
    """What differs between two runs of one case, in words."""
    failures = [(run / FAILED).read_text() if (run / FAILED).exists() else "" for run in (this, other)]
    if any(failures):
        yield f"FAILED: {failures[0] or 'runs'} → {failures[1] or 'runs'}"
        return
    for name, ignored in TABLES.items():
        yield from table_differences(name, read(this / name), read(other / name), ignored)
    ours, theirs = (
        {path.name: path for path in (run / "models").glob("client-*.safetensors")} for run in (this, other)
    )
    if not ours or not theirs:
        yield "a run has no models"
    server = "server.safetensors"
    if all((run / "models" / server).exists() for run in (this, other)):
        ours[server], theirs[server] = this / "models" / server, other / "models" / server
    if ours.keys() != theirs.keys():
        yield f"models: only one version has {', '.join(sorted(ours.keys() ^ theirs.keys()))}"
    for name in sorted(ours.keys() & theirs.keys()):
        changed = changed_tensors(load_file(ours[name]), load_file(theirs[name]))
        if changed:
            yield f"{name.removesuffix('.safetensors')}: {changed[0]}{more(len(changed) - 1, 'tensors')}"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table_differences(
    name: str, ours: list[dict[str, str]], theirs: list[dict[str, str]], ignored: tuple[str, ...]
) -> Iterator[str]:
    """Rows and columns that only one version has, and all others that differ; of the first also how."""
    if len(ours) != len(theirs):
        yield f"{name}: {len(ours)} → {len(theirs)} rows"
    if not ours or not theirs:
        return
    alone = ours[0].keys() ^ theirs[0].keys()
    if alone:
        yield f"{name}: only one version has {', '.join(sorted(alone))}"
    changed = {}
    for column in (column for column in ours[0] if column not in (*alone, *ignored)):
        pairs = zip((row[column] for row in ours), (row[column] for row in theirs), strict=False)
        found = [f"{mine} → {other} in row {row}" for row, (mine, other) in enumerate(pairs, start=1) if mine != other]
        if found:
            changed[column] = found[0]
    if changed:
        first, *others = changed
        yield ", ".join([f"{name}: {first} ({changed[first]})", *others])


def changed_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same to the bit, with their largest difference where it has one."""
    changed = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            changed.append(f"{name} (only one version has it)")
            continue
        mine, other = ours[name], theirs[name]
        if mine.dtype != other.dtype or mine.shape != other.shape:
            changed.append(f"{name} ({mine.dtype}{list(mine.shape)} → {other.dtype}{list(other.shape)})")
        elif mine.numpy().tobytes() != other.numpy().tobytes():
            changed.append(f"{name} (by up to {float((mine.double() - other.double()).abs().max()):.1e})")
    return changed


def more(count: int, what: str) -> str:
    return f" and {count} more {what}" if count else ""


if __name__ == "__main__":
    main()
