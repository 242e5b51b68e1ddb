"""Every method on two engines and one device: do they give the same numbers?

Five clients with the five CNNs on digits, three rounds, without TF32. Prints the largest difference of each method's
training loss and accuracy over rounds and clients; exits with status 1 if a loss differs by more than a hundredth.

    python benchmarks/engine_parity.py --device cuda [--engine vectorized] [--methods fedproto,pfedes]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import polyfed
from polyfed.assemble import find_device
from polyfed.compute import machine_name


def rounds(method: str, engine: str, device: str, folder: Path) -> polyfed.Result:
    """A short run of the method on the engine."""
    models = "cnn5" if method == "fedavg" else "papers"
    return polyfed.run(
        method, models=models, clients=5, classes_per_client=4, rounds=3, lr=0.01, seed=1, engine=engine, device=device,
        tf32=False, out=folder / f"{method}-{engine}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="vectorized")
    parser.add_argument("--methods", default=",".join(polyfed.METHODS))
    options = parser.parse_args()
    print(f"{options.engine} against sequential on {machine_name(find_device(options.device))}")
    print(f"{'method':12s} {'loss':>10s} {'difference':>11s} {'accuracy':>9s} {'difference':>11s}  fallbacks")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for method in options.methods.split(","):
            plain, other = (
                rounds(method, engine, options.device, Path(folder)) for engine in ("sequential", options.engine)
            )
            loss, accuracy = plain.rounds.loss_mean, plain.clients.accuracy_final
            loss_gap = ((other.rounds.loss_mean - loss).abs() / loss.abs()).max()
            accuracy_gap = (other.clients.accuracy_final - accuracy).abs().max()
            fallbacks = sum("one after another" in str(event.get("note")) for event in other.folder.events())
            worst = max(worst, loss_gap)
            print(
                f"{method:12s} {loss.iloc[-1]:10.5f} {loss_gap:11.1e} {accuracy.mean():9.4f} {accuracy_gap:11.1e}"
                f"  {fallbacks}",
                flush=True,
            )
    sys.exit(int(worst > 1e-2))


if __name__ == "__main__":
    main()
