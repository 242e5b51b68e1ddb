"""What a round's record counts when replies are refused, and which of equally good rounds is the best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from polyfed.message import Message
from polyfed.methods.base import Batch, ClientNetwork, Trained
from tests import support

CLASSES = 3
LOSSES = (1.0, 2.0, 6.0)
"""Of the clients that own class 0, 1 and 2."""
SETTINGS: dict[str, Any] = {
    "models": support.Wide, "clients": CLASSES, "classes_per_client": 1, "rounds": 2, "device": "cpu",
}  # fmt: skip


class Known(polyfed.METHODS["lg-fedavg"]):  # type: ignore[misc]
    """LG-FedAvg with losses that are known beforehand, one for each class."""

    name = "known-losses"

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        given = torch.tensor(LOSSES, device=batch.x.device)[batch.y]
        return given + 0 * net(batch.x).sum(1)


class OneRefused(Known):
    """The client that owns class 1 sends numbers that are not finite."""

    name = "one-refused"

    def upload(self, client: Trained) -> Message:
        message: Message = super().upload(client)
        if client.classes.tolist() == [1]:
            return Message({name: t * torch.nan for name, t in message.tensors.items()}, message.metadata)
        return message


def rounds(method: type[polyfed.Method], engine: str) -> Any:
    return polyfed.run(method, data=support.tiny_dataset(classes=CLASSES), engine=engine, **SETTINGS).rounds


@pytest.mark.parametrize("engine", ["sequential", "threads", "vectorized"])
def test_a_refused_upload_was_sent_but_its_loss_does_not_count(engine: str) -> None:
    honest, spoiled = rounds(Known, engine), rounds(OneRefused, engine)
    assert honest.replies.tolist() == [3, 3] and spoiled.replies.tolist() == [2, 2]
    assert honest.loss_mean.tolist() == [3.0, 3.0]
    assert spoiled.loss_mean.tolist() == [3.5, 3.5]
    per_client = (support.FEATURES + 1) * CLASSES  # a head's weights and biases
    assert honest.upload_floats.tolist() == [3 * per_client] * 2
    for sent in ("upload_floats", "upload_bytes", "download_floats", "download_bytes", "flops"):
        assert spoiled[sent].tolist() == honest[sent].tolist(), f"{sent} count what was done, refused or not"


def test_a_whole_run_sums_up_what_was_sent_in_all_rounds() -> None:
    result = polyfed.run(OneRefused, data=support.tiny_dataset(classes=CLASSES), **SETTINGS)
    assert result.summary["upload_floats"] == result.rounds.upload_floats.sum() > 0
    assert result.summary["flops"] == result.rounds.flops.sum() > 0


def test_of_equally_good_rounds_the_first_is_the_best() -> None:
    """With losses that do not depend on the network nothing changes, so all rounds are equally good."""
    result = polyfed.run(Known, data=support.tiny_dataset(classes=CLASSES), **SETTINGS | {"rounds": 3})
    assert result.rounds["round"].tolist() == [1, 2, 3] and result.rounds.accuracy_mean.nunique() == 1
    assert result.summary["best_round"] == 1
    assert result.summary["best_validation_round"] == 1
