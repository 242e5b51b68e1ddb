"""Counted operations against counts by hand."""

import pytest
import torch
from torch import Tensor, nn

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.data import Dataset
from polyfed.engines import SequentialEngine
from polyfed.engines.client.flops import ClientFlops, count_flops
from polyfed.methods.base import Phase
from polyfed.population import Population
from tests import support
from tests.kinds import texts

CONV1, CONV2, FC1, FC2, FC3 = 28 * 28 * 16 * 75, 10 * 10 * 32 * 400, 800 * 2000, 2000 * 500, 500 * 10
FORWARD = 2 * (CONV1 + CONV2 + FC1 + FC2 + FC3)


def cifar_clients(method: str, **settings: str) -> Population:
    images = torch.zeros(20, 3, 32, 32, dtype=torch.uint8)
    dataset = Dataset("grey", images, torch.arange(20) % 10, 10, (0.5,) * 3, (0.5,) * 3)
    config = experiment(
        method=method, data="python:grey", models="cnn1", clients=1, partition="iid", device="cpu", **settings
    )
    return assemble(config, dataset)


def test_standalone_cnn1_is_counted_as_by_hand() -> None:
    """Forward 2 · 4 825 800; backward twice that, less the input's gradient, which the first layer need not give."""
    clients = cifar_clients("standalone")
    flops = count_flops(clients.new_network(0), clients.method)
    assert FORWARD == 2 * 4_825_800
    assert flops == ClientFlops({"model": 3 * FORWARD - 2 * CONV1}, 0.0)
    assert 2.5 < flops.phases["model"] / FORWARD < 3


def test_the_pass_for_prototypes_is_one_forward_through_the_extractor() -> None:
    clients = cifar_clients("fedproto")
    assert count_flops(clients.new_network(0), clients.method).collect == FORWARD - 2 * FC3


def test_the_pass_for_covariances_adds_a_product_per_sample() -> None:
    """K = 500: two operations for each of 500 · 500 entries."""
    clients = cifar_clients("dc-pfl")
    assert count_flops(clients.new_network(0), clients.method).collect == FORWARD - 2 * FC3 + 2 * 500 * 500


def test_a_round_multiplies_by_visited_samples() -> None:
    """20 visits at 3 operations, 5 at 5, and a collecting pass over 10 samples at 7."""
    flops = ClientFlops({"all": 3.0, "half": 5.0}, 7.0)
    assert flops.of_round({"all": 20, "half": 5}, 10) == 20 * 3 + 5 * 5 + 10 * 7


@pytest.mark.parametrize("samples", [1, 3, 5, 7])
def test_parts_add_up_to_all_samples(samples: int) -> None:
    """Neighbouring parts round alike, so that two halves are a whole."""
    halves = [
        Phase(name, ("model",), lambda net, batch: batch.x, epochs=1, part=part).edges(samples)
        for name, part in (("first", (0.0, 0.5)), ("second", (0.5, 1.0)))
    ]
    assert sum(stop - start for start, stop in halves) == samples


class Reader(nn.Module):
    """Token vectors, a layer over them, and a linear layer on its last step."""

    def __init__(self, layer: nn.Module, looks: bool = False) -> None:
        super().__init__()
        self.vectors, self.layer, self.out = nn.Embedding(20, 6), layer, nn.Linear(6, 4)
        self.looks = looks

    def forward(self, ids: Tensor) -> Tensor:
        if self.looks and int(ids.sum()) < 0:  # a decision about values, which tensors without content do not have
            return ids
        found = self.layer(self.vectors(ids))
        steps = found[0] if isinstance(found, tuple) else found
        logits: Tensor = self.out(steps[:, -1])
        return logits


LAYERS = {
    # Each step multiplies 6 numbers with 4 gates of 6, twice.
    "lstm": (nn.LSTM(6, 6, batch_first=True), 9 * 2 * (2 * 4 * 6 * 6)),
    "gru": (nn.GRU(6, 6, batch_first=True), 9 * 2 * (2 * 3 * 6 * 6)),
    # Query, key, value and answer of 6 x 6, two layers of 6 x 12; scores and means over 9 steps for each of 9.
    "attention": (
        nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
        9 * 2 * (4 * 6 * 6 + 2 * 6 * 12) + 2 * 2 * 9 * 9 * 6,
    ),
    # A lookup multiplies nothing.
    "nothing": (nn.Identity(), 0),
}


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_for_sequences_are_counted_with_and_without_content(kind: str, looks: bool) -> None:
    """The pass for prototypes is one forward without the head; fused kernels would hide its products."""
    layer, forward = LAYERS[kind]
    clients = support.population("fedproto", data=texts(), models=[Reader(layer, looks)])
    engine = SequentialEngine(clients)
    flops = engine._client_flops(0)
    assert flops.collect == forward
    assert flops.phases["model"] >= 2 * forward + 2 * 3 * 6 * 4 - 9 * 2 * 4 * 6 * 6
