"""The addresses of all random draws, as docs/architecture.md lists them: a change of one changes everyone's numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed
from polyfed import seeds
from polyfed.methods.base import Server
from tests import support

SEED = 5
CLIENT_ROUNDS = [(1, 0), (1, 1), (2, 0), (2, 1)]
"""Rounds and clients in which someone trains, in a run of two rounds in which both clients take part."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every address that is asked for from now on, without the run's seed; others' seeds would be a fault."""
    addresses: list[str] = []
    derive = seeds.derive

    def remember(seed: int, *purpose: str | int) -> int:
        assert seed == SEED
        addresses.append("/".join(map(str, purpose)))
        return derive(seed, *purpose)

    for name, module in list(sys.modules.items()):
        if name.startswith("polyfed") and getattr(module, "derive", None) is derive:
            monkeypatch.setattr(module, "derive", remember)
    return addresses


def run(method: str, **settings: Any) -> polyfed.Result:
    models = [support.Wide] if method == "fedavg" else [support.Wide, support.Narrow]
    defaults = {"models": models, "clients": 2, "rounds": 2, "seed": SEED, "engine": "sequential", "device": "cpu"}
    return polyfed.run(method, data=support.tiny_dataset(), **{**defaults, **settings})


def each(purpose: str) -> set[str]:
    """A purpose's addresses in every round for every client that trains."""
    return {f"{purpose}/{round}/{client}" for round, client in CLIENT_ROUNDS}


ALWAYS = {"partition", "split", "initial/Wide/shared", "initial/method", *each("batches/model"), *each("upload")}
HEAD = {"initial/head", "initial/Wide/head"}
AUXILIARY = {"initial/Narrow/auxiliary"}
MORE: dict[str, set[str]] = {
    "fedtgp": {"initial/trainable prototypes", "server/prototypes/1", "server/prototypes/2"},
    "dc-pfl": HEAD | {
        "server/virtual features/1", "server/virtual features/2", "server/calibration/1", "server/calibration/2",
    },
    "fedorgp": {"initial/trainable prototypes", "server/prototypes/1", "server/prototypes/2"},
    "protonorm": {"server/directions/1", "server/directions/2"},
    "fedgh": HEAD | {"server/header/1", "server/header/2"},
    "fedre": HEAD | {"server/header/1", "server/header/2"},
    "fedgen": HEAD | {"initial/generator", "server/generator/1", "server/generator/2"},
    "lg-fedavg": HEAD,
    "fedclassavg": HEAD,
    "fedssa": HEAD,
    "fml": AUXILIARY,
    "fedkd": AUXILIARY,
    "fedmrl": AUXILIARY,
    "fedapen": AUXILIARY | each("batches/mixing") | each("batches/adapted") | {"parts/0/0", "parts/0/1"},
    "fedl2g": {"server/guiding vectors/0", *each("probe"), "parts/0/0", "parts/0/1"},
    "pfedes": {"initial/proxy", *each("batches/proxy")},
    "pfedafm": AUXILIARY | each("batches/shared"),
}  # fmt: skip
"""What methods draw beyond what all draw."""


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_every_draw_of_a_method_has_its_documented_address(method: str, asked: list[str]) -> None:
    run(method)
    second = set() if method == "fedavg" else {"initial/Narrow/shared"}
    drawn = {address for address in asked if not address.startswith("dropout/")}  # these networks have none
    assert drawn == ALWAYS | second | MORE.get(method, set())


class Drawing(nn.Module):
    """A network with dropout of both kinds: a layer, and a function that draws from torch's global generator."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(torch.tensor(input_shape).prod()), 4), nn.Dropout(0.5))
        self.out = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(nn.functional.dropout(self.body(x), 0.1, self.training))
        return logits


class Chosen(polyfed.Watcher):
    """Remembers who trained in which round."""

    def __init__(self) -> None:
        self.clients: list[tuple[int, int]] = []

    def on_client(self, round: int, client: int) -> None:
        self.clients.append((round, client))


@pytest.mark.parametrize("engine", ["sequential", "threads", "vectorized"])
def test_a_run_with_every_kind_of_draw(engine: str, asked: list[str]) -> None:
    chosen = Chosen()
    run(
        "standalone", models=Drawing, clients=4, participation=0.5, assignment="random", start="client", engine=engine,
        devices="three-tier", watcher=chosen,
    )  # fmt: skip
    assert len(chosen.clients) == 4
    trained = {
        f"{purpose}/{round}/{client}"
        for round, client in chosen.clients
        for purpose in ("batches/model", "dropout", "network/model", "network/answer", "upload")
    }
    # Clients that have not changed since are not evaluated again.
    evaluated = {f"network/evaluation/1/{client}" for client in range(4)} | {
        f"network/evaluation/2/{client}" for round, client in chosen.clients if round == 2
    }
    before = {"partition", "split", "architectures", "devices", "participants/1", "participants/2", "initial/method"}
    first = {f"initial/Drawing/{client}" for client in range(4)}
    # What is tried before round one draws too, but leaves nothing behind.
    counted = {address for address in asked if "/0/" not in address and address != "initial/Drawing/shared"}
    assert counted == before | first | trained | evaluated


def test_engines_ask_for_the_same_batches(asked: list[str]) -> None:
    """Round 0 is where the vectorized engine tries whether a network can be stacked."""
    for engine in ("sequential", "threads", "vectorized"):
        asked.clear()
        run("fedapen", engine=engine)
        batches = {address for address in asked if address.startswith("batches/") and "/0/" not in address}
        assert batches == each("batches/model") | each("batches/mixing") | each("batches/adapted")
        assert {address for address in asked if address.startswith("parts/")} == {"parts/0/0", "parts/0/1"}
        assert {address for address in asked if address.startswith("upload/")} == each("upload")
        asked.clear()
        run("fedl2g", engine=engine)
        probes = {address for address in asked if address.startswith("probe/") and "/0/" not in address}
        assert probes == each("probe")


@pytest.mark.parametrize(
    ("address", "number"),
    [
        (("partition",), 3469488402443133942),
        (("split",), 7170711763998781544),
        (("architectures",), 5689146054326683037),
        (("devices",), 7865172253109361819),
        (("initial", "Wide", "shared"), 8551519177290301633),
        (("initial", "Wide", 3), 7081154332596704048),
        (("initial", "Narrow", "auxiliary"), 3889468268795747386),
        (("initial", "method"), 533127851133043240),
        (("participants", 2), 3516156455664505041),
        (("batches/model", 2, 1), 5143646986715504577),
        (("parts", 0, 1), 1410509411745378761),
        (("dropout", 2, 1), 7117366848806044509),
        (("probe", 2, 1), 8478057824654326557),
        (("network/model", 2, 1), 3852185145879457459),
        (("upload", 2, 1), 1987590966984483028),
        (("server", "header", 2), 3947544012822776926),
    ],
)
def test_seeds_of_documented_addresses_are_written_down(address: tuple[str | int, ...], number: int) -> None:
    assert seeds.derive(SEED, *address) == number
    assert seeds.torch_generator(SEED, *address).initial_seed() == number
    with seeds.seeded(SEED, *address):
        assert torch.initial_seed() == number


def test_a_server_draws_by_purpose_and_round() -> None:
    assert Server(SEED, round=3).generator("header").initial_seed() == seeds.derive(SEED, "server", "header", 3)


def test_the_documentation_lists_every_address() -> None:
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    kinds = {address.split("/")[0] for addresses in (ALWAYS, *MORE.values()) for address in addresses}
    for kind in kinds | {"architectures", "participants", "devices", "dropout", "network"}:
        assert f"`{kind}" in text.split("## Seeds")[1].split("\n## ")[0]
