"""Counted operations against counts by hand."""

import pytest
import torch

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.data import Dataset
from polyfed.engines.client.flops import ClientFlops, count_flops
from polyfed.methods.base import Phase
from polyfed.population import Population

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
