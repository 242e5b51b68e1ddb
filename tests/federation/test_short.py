"""A federation of four processes, from its files to its numbers: those of a simulation, bit by bit."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from tests.federation import support


def test_a_federation_has_the_numbers_of_a_simulation(tmp_path: Path) -> None:
    """FedTGP, whose server draws too; three networks, one with batch norm, one a user's own."""
    with support.federation(tmp_path, "fedtgp") as real:
        real.start()
        real.finish()
        support.assert_equals_simulation(real)


@pytest.mark.federation
@pytest.mark.parametrize("method", ["fedproto", "pfedes", "fedssa", "dc-pfl", "fml"])
def test_other_methods_too(tmp_path: Path, method: str) -> None:
    """Prototypes, a proxy, headers, a schedule over rounds, a network that everyone has."""
    with support.federation(tmp_path, method, rounds=2) as real:
        real.start()
        real.finish()
        support.assert_equals_simulation(real)
