"""Floats per round of all clients together in Table 5 of the FedTGP paper, from real messages.

20 clients, CIFAR-100, K = 512 features, the 4-layer CNN as common network; together the clients hold 890 pairs of
client and class. FD and FedGen stand in tests of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.data import Dataset
from polyfed.methods.base import Method, Trained
from polyfed.methods.parts.statistics import class_means
from tests import support

HELD = [list(range(44)) for _ in range(10)] + [list(range(55, 100)) for _ in range(10)]
"""10 clients with 44 classes and 10 with 45: 890 pairs; classes 44 to 54 have no owner."""


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    images = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    return Dataset("grey", images, torch.arange(200) % 100, 100, (0.5,) * 3, (0.5,) * 3)


def method_of(dataset: Dataset, name: str, **options: Any) -> Method:
    config = experiment(
        method={"name": name, **options}, data="python:grey", models="cnn", clients=20, partition="iid", device="cpu",
        classes_per_client=10,
    )  # fmt: skip
    return assemble(config, dataset).method


@pytest.mark.parametrize(("name", "expected"), [("lg-fedavg", 2_052_000), ("fml", 36_988_320)])
def test_networks_and_heads(dataset: Dataset, name: str, expected: int) -> None:
    """LG-FedAvg: 20 · 2 · 51 300. FML: 20 · 2 · 924 708."""
    method = method_of(dataset, name)
    server = support.new_server(method)
    down = method.download(server, 0, None).floats
    model = method.task.new_model()
    state = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    for module, part in method.client_modules(model).items():
        state |= {f"{module}.{key}": tensor for key, tensor in part.state_dict().items()}
    up = method.upload(Trained(torch.ones(100, dtype=torch.int64), 1, state=state)).floats
    assert 20 * (up + down) == expected


@pytest.mark.parametrize(("name", "options"), [("fedproto", {}), ("fedtgp", {"server_epochs": 1})])
def test_prototypes(dataset: Dataset, name: str, options: dict[str, int]) -> None:
    """Up 512 · 890; down 512 for every class to every client, 20 · 512 · 100: together 512 · 2 890 = 1 479 680.

    FedTGP always sends all hundred; FedProto the classes that have an owner, all of them in the paper's setting, so the
    eleven without one here are added by a last client.
    """
    method = method_of(dataset, name, **options)
    server = support.new_server(method)
    uploads = []
    for held in HELD:
        own = class_means(torch.ones(len(held), 512), torch.tensor(held), 100)
        counts = torch.zeros(100, dtype=torch.int64).index_fill_(0, torch.tensor(held), 1)
        uploads.append(method.upload(Trained(counts, 1, statistics=own)))
    rest = support.reply(20, {"prototypes": torch.ones(11, 512)}, labels=list(range(44, 55)))
    replies = [support.Reply(client, message) for client, message in enumerate(uploads)]
    method.aggregate(server, [*replies, rest])
    down = method.download(server, 0, None).floats
    assert sum(message.floats for message in uploads) + 20 * down == 1_479_680
