"""A federation of four processes, from its files to its numbers: those of a simulation, bit by bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from polyfed.deploy.member import simulated
from polyfed.engines import SequentialEngine
from polyfed.records import RunFolder
from polyfed.server.federation import Federation
from tests.federation import support


def test_a_federation_has_the_numbers_of_a_simulation(tmp_path: Path) -> None:
    """FedTGP, whose server draws too; three networks, one with batch norm, one a user's own."""
    with support.federation(tmp_path / "real", "fedtgp") as real:
        real.start()
        run = real.finish()
        people = simulated(real.members())
        config = real.members()[0].terms.experiment()
        alone = Federation(config, people.method, SequentialEngine(people), RunFolder.create(tmp_path / "one", config))
        alone.run()
        told = ["round", "loss_mean", "accuracy_mean", "accuracy_std", "participants", "replies", "upload_floats"]
        assert run.rounds()[told].equals(alone.folder.rounds()[told])
        assert all(
            torch.equal(tensor, alone.folder.server_state()[name]) for name, tensor in run.server_state().items()
        )
        for number, name in enumerate(support.NAMES):
            (newest,) = (tmp_path / "real" / f"state-{name}" / "rounds").glob("state.3.*.safetensors")
            own, expected = load_file(newest), alone.engine.states.get_state(number)  # type: ignore[union-attr]
            assert own.keys() == expected.keys()
            assert all(torch.equal(own[key], expected[key]) for key in own), name
