"""How often the server waits for a GPU in a round of DC-PFL: as often with many clients as with few."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from polyfed.errors import BadMessage
from polyfed.message import Message
from polyfed.methods.base import Method, Reply
from polyfed.methods.dc_pfl import DCPFL
from polyfed.methods.parts.gaussians import possible, possible_each
from polyfed.server.replies import Door, Sizes
from tests import support
from tests.waits import Waits

SIZE = support.FEATURES
TRIANGLE = SIZE * (SIZE + 1) // 2


def sent(client: int, classes: int = 2) -> Reply:
    """Class statistics of nine samples of each class."""
    samples = torch.randn(classes, 9, SIZE, generator=torch.Generator().manual_seed(client))
    away = samples - samples.mean(1, keepdim=True)
    rows, columns = torch.triu_indices(SIZE, SIZE)
    covariances = (away.mT @ away / 8)[:, rows, columns]
    tensors = {"means": samples.mean(1), "covariances": covariances}
    return support.reply(client, tensors, labels=list(range(classes)), counts=[9] * classes)


def spoiled(reply: Reply, name: str, row: int, place: int, value: float) -> Reply:
    """The same with one other number."""
    tensors = {key: tensor.clone() for key, tensor in reply.message.tensors.items()}
    tensors[name][row, place] = value
    return Reply(reply.client, Message(tensors, reply.message.metadata))


def waits(clients: int, *, hostile: bool = False) -> Counter[str]:
    method = support.new_method("dc-pfl")
    server = support.new_server(method)
    replies = [sent(client) for client in range(clients)]
    if hostile:
        replies[1] = spoiled(replies[1], "covariances", 1, 3, math.nan)
    with Waits(reply.message.tensors["covariances"] for reply in replies) as counted:
        accepted, refused = Door(method, 100).admit(1, replies, Sizes())
        method.aggregate(server, accepted)
    assert len(refused) == hostile
    return counted.found


def test_a_look_is_counted_and_so_is_one_at_what_was_computed() -> None:
    values, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    with Waits([values]) as counted:
        assert bool((torch.stack([values, values]) * 2).sum() > 0)
        assert float(other) == 3.0
        assert values.max().item() == 2.0
        assert len(other[torch.tensor([True])]) == 1
        assert len(values[values > 1]) == 1
    assert counted.found == {"__bool__": 1, "item": 1, "__getitem__": 1}


def test_waits_do_not_grow_with_the_number_of_clients() -> None:
    """One look at all covariances, one at all sizes, and one at the vectors that are drawn."""
    few, many = waits(3), waits(24)
    assert few == many
    assert many.total() == 3


def test_only_a_reply_that_is_wrong_is_looked_at_again() -> None:
    assert waits(24).total() < waits(24, hostile=True).total() == waits(5, hostile=True).total() < 6


WRONG = {
    "NaN": ("covariances", 1, 3, math.nan, "'covariances' holds values that are not finite."),
    "infinite": ("covariances", 0, 2, -math.inf, "'covariances' holds values that are not finite."),
    "infinite variance": ("covariances", 1, 0, math.inf, "'covariances' holds values that are not finite."),
    "negative variance": ("covariances", 1, SIZE, -1e-3, "'covariances' holds a negative variance."),
    "too large": (
        "covariances", 0, 1, 50.0, "'covariances' holds a covariance that is larger than its two variances allow.",
    ),
    "NaN in means": ("means", 1, 2, math.nan, "'means' holds values that are not finite."),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("wrong", [(0,), (4,), (1, 2, 5)])
def test_wrong_replies_among_right_ones_are_refused_with_their_reason(kind: str, wrong: tuple[int, ...]) -> None:
    name, row, place, value, reason = WRONG[kind]
    replies = [sent(client) for client in range(6)]
    for client in wrong:
        replies[client] = spoiled(replies[client], name, row, place, value)
    accepted, refused = Door(support.new_method("dc-pfl"), 100).admit(1, replies, Sizes())
    assert refused == dict.fromkeys(wrong, reason)
    assert [reply.client for reply in accepted] == [client for client in range(6) if client not in wrong]


def test_the_first_reason_counts_although_all_are_looked_at() -> None:
    """A wrong shape comes before a wrong value further on, failures before both; empty replies are right."""
    shape = Reply(1, Message({**sent(1).message.tensors, "means": torch.zeros(2, SIZE + 1)}, sent(1).message.metadata))
    both = spoiled(spoiled(sent(2), "means", 0, 0, math.inf), "covariances", 0, 0, -1.0)
    failed = Reply(3, Message(), failure="no answer")
    empty = support.reply(4, {"means": torch.zeros(0, SIZE), "covariances": torch.zeros(0, TRIANGLE)})
    empty = Reply(4, Message(empty.message.tensors, dict.fromkeys(("labels", "counts"), torch.zeros(0).long())))
    replies = [sent(0), shape, both, failed, empty, sent(5, classes=4)]
    accepted, refused = Door(support.new_method("dc-pfl"), 100).admit(1, replies, Sizes())
    assert [reply.client for reply in accepted] == [0, 4, 5]
    assert f"has shape (2, {SIZE + 1})" in refused[1]
    assert refused[2] == "'means' holds values that are not finite."
    assert refused[3] == "no answer"


def test_nothing_that_is_certain_is_refused_by_a_check() -> None:
    method = support.new_method("dc-pfl")
    hostile = [spoiled(sent(0), name, row, place, value) for name, row, place, value, _ in WRONG.values()]
    overflowing = Reply(1, Message({**sent(1).message.tensors, "covariances": torch.full((2, TRIANGLE), 3e38)}))
    messages = [reply.message for reply in [sent(3), *hostile, overflowing, sent(4)]]
    certain = method.certain(messages)
    assert certain == [True, *[False] * len(hostile), False, True]


def test_a_check_of_ones_own_is_asked_about_every_reply() -> None:
    class Strict(DCPFL):
        def check(self, message: Message) -> None:
            super().check(message)
            if float(message.tensors["covariances"].max()) > 2.2:
                raise BadMessage("too lively.")

    given = support.new_method("dc-pfl")
    strict: Method = Strict(given.config, given.task, given.training)
    replies = [sent(client) for client in range(6)]
    lively = [r.client for r in replies if float(r.message.tensors["covariances"].max()) > 2.2]
    assert 0 < len(lively) < 6
    _, refused = Door(strict, 100).admit(1, replies, Sizes())
    assert refused == dict.fromkeys(lively, "too lively.")


@pytest.mark.parametrize("block", [1, 3 * TRIANGLE, 1 << 22])
def test_blocks_of_any_size_find_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.methods.parts.gaussians._LARGEST_BLOCK", {"cpu": block})
    right: list[Tensor] = [sent(c, n).message.tensors["covariances"] for c, n in enumerate((2, 4, 1, 3))]
    wrong = right[1].clone()
    wrong[3, 0] = -1.0
    given = [right[0], wrong, torch.zeros(0, TRIANGLE), right[2], right[3]]
    assert possible_each(given, SIZE) == [True, False, True, True, True] == [possible(each, SIZE) for each in given]
    assert possible_each([], SIZE) == []
