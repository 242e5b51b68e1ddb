"""A federation of three organisations on one machine: every step that they take, as the commands that they type.

Run it with `make federation`. A server and three sites start as separate processes, with TLS and keys. The sites have
different classes of handwritten digits and different networks: one of the papers' CNNs, a small ResNet with batch norm,
and one site's own class (own_network.py). After five rounds each site has its own model.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

import polyfed

HERE = Path(__file__).parent
HOME = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/federation")
SITES = {
    "amber": ("cnn5", [0, 1, 2, 3, 4]),
    "birch": ("resnet4", [3, 4, 5, 6, 7]),
    "cedar": ("own_network:Strokes", [7, 8, 9, 0, 1]),
}
ROUNDS = 5
COMMAND = [sys.executable, "-m", "polyfed"]
console = Console(highlight=False)


def main() -> None:
    """Prepare the organisations' folders, start everybody, wait, show what each has in the end."""
    if HOME.exists():
        raise SystemExit(f"{HOME} is there already: remove it first, or name another folder.")
    for name in ("server", *SITES):
        (HOME / name).mkdir(parents=True)
    port = _free_port()
    _make_keys()
    _write_terms(port)
    for number, (name, (network, classes)) in enumerate(SITES.items()):
        _write_data(name, classes, number)
        _write_site(name, network, port)
    console.print("What [bold]amber[/] would send, before it connects to anybody:")
    polyfed_in("amber", "site", "check")
    _run_all()
    _show_models()


def polyfed_in(party: str, *arguments: str) -> None:
    """A command in that party's folder, as its people would type it."""
    console.print(f"\n[dim]{party} $[/] polyfed {' '.join(arguments)}")
    subprocess.run([*COMMAND, *arguments], cwd=HOME / party, check=True)


def _make_keys() -> None:
    """The coordinator makes the server's certificate; every site makes its own key, which never leaves it."""
    polyfed_in("server", "server", "keys", "keys", "--host", "127.0.0.1")
    for name in SITES:
        polyfed_in(name, "server", "keys", ".", "--site", name)
        shutil.copy(HOME / "server/keys/ca.crt", HOME / name)


def _write_terms(port: int) -> None:
    """The coordinator writes the terms and gives them to everybody. People use `polyfed server init` and an editor."""
    digits = polyfed.load_dataset("digits")
    terms = {
        "name": "digits-1",
        "method": "fedproto",
        "rounds": ROUNDS,
        "training": {"epochs": 4, "batch_size": 16, "lr": 0.05},
        "task": {
            "classes": 10,
            "input_shape": list(digits.input_shape),
            "mean": list(digits.mean),
            "std": list(digits.std),
            "features": 48,
        },
        "members": {name: " ".join((HOME / name / f"{name}.pub").read_text().split()[:2]) for name in SITES},
        "server": {"listen": f"127.0.0.1:{port}", "minimum_members": len(SITES)},
    }
    for name in ("server", *SITES):
        (HOME / name / "federation.yaml").write_text(yaml.safe_dump(terms, sort_keys=False))


def _write_data(name: str, classes: list[int], number: int) -> None:
    """A site's own samples: a third of those of its classes."""
    digits = polyfed.load_dataset("digits")
    labels = digits.labels.numpy()
    own = np.flatnonzero(np.isin(labels, classes))[number::3]
    np.savez(HOME / name / "digits.npz", x=digits.images.numpy()[own], y=labels[own])


def _write_site(name: str, network: str, port: int) -> None:
    """A site's own file. People use `polyfed site init` and an editor."""
    shutil.copy(HERE / "own_network.py", HOME / name)
    site = {"name": name, "server": f"127.0.0.1:{port}", "data": "npz:digits.npz", "network": network}
    (HOME / name / "site.yaml").write_text(yaml.safe_dump(site, sort_keys=False))


def _run_all() -> None:
    """The server shows its progress here; what the sites print is in their folders."""
    console.print("\nNow a server and three sites, each a process of its own:")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for name in SITES:
            console.print(f"[dim]{name} $[/] polyfed site run")
            with (HOME / name / "output.txt").open("wb") as output:
                command = [*COMMAND, "site", "run"]
                processes.append(
                    subprocess.Popen(command, cwd=HOME / name, env=environment, stdout=output, stderr=output)
                )
        polyfed_in("server", "server", "run")
        for process in processes:
            if process.wait(60) != 0:
                raise SystemExit(f"a site failed: see {HOME}/*/output.txt")
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()


def _show_models() -> None:
    """Each site's model, as `polyfed predict` uses it, on its own test samples."""
    table = Table("site", "network", "accuracy on its own test samples", box=None)
    for name, (network, _) in SITES.items():
        card = yaml.safe_load((HOME / name / "state/model/card.json").read_text())
        table.add_row(name, network, f"{100 * card['accuracy_exported']:.1f} % of {card['test_samples']}")
    console.print(f"\nEvery site has its own model now ({HOME}/SITE/state/model), and nobody else has it:")
    console.print(table)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    begin = time.perf_counter()
    main()
    console.print(f"\nThat took {time.perf_counter() - begin:.0f} s; all files are in {HOME}.")
