"""The door: which replies are fused, what is remembered of them, and who is named when training diverges."""

import json
import math

import pytest
import torch
from torch import Tensor

from polyfed.errors import DivergedError
from polyfed.message import Counts, Floats, Message, Schema
from polyfed.methods.base import Method, Reply
from polyfed.server.replies import REMEMBERED_ROUNDS, Door, Sizes
from tests import support


class Sent(Method):
    """Clients send two vectors and perhaps how many samples of each of two classes they have."""

    def schema(self) -> Schema:
        return Schema({"a": Floats(("any",)), "b": Floats((1,))}, {"counts": Counts((2,), optional=True)})


def door(bound: float | None = 100, most_samples: int = 50) -> Door:
    method = support.new_method("standalone")
    return Door(Sent(method.config, method.task, method.training), bound, most_samples)


def reply(client: int, a: float = 1.0, b: float = 1.0, counts: list[int] | None = None) -> Reply:
    metadata = {} if counts is None else {"counts": torch.tensor(counts)}
    return Reply(client, Message({"a": torch.tensor([0.5, -a]), "b": torch.tensor([b])}, metadata))


def admitted(door: Door, replies: list[Reply], sizes: Sizes | None = None, round: int = 1) -> list[int]:
    sound, refused = door.admit(round, replies, sizes or Sizes())
    assert sorted([reply.client for reply in sound] + list(refused)) == sorted(reply.client for reply in replies)
    return [reply.client for reply in sound]


def test_a_reply_passes_its_checks_in_order() -> None:
    silent = Reply(0, Message(), failure="no answer")
    unlike = Reply(1, Message({"a": torch.full((2,), math.nan)}, {"counts": torch.tensor([99, 99])}))
    _, refused = door().admit(1, [silent, unlike, reply(2, 1e9, counts=[40, 11]), reply(3, counts=[40, 10])], Sizes())
    assert list(refused) == [0, 1, 2]
    assert refused[0] == "no answer"
    assert "lacks the tensor" in refused[1]
    assert refused[2] == "'counts' claims 51 samples, more than a client can have (50)."


@pytest.mark.parametrize("spoiled", ["a", "b"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_reply_far_larger_than_the_others_is_refused(spoiled: str, sign: float) -> None:
    replies = [reply(client) for client in range(4)]
    assert admitted(door(), [*replies, reply(4, **{spoiled: sign * 99})]) == [0, 1, 2, 3, 4]
    assert admitted(door(), [*replies, reply(4, **{spoiled: sign * 101})]) == [0, 1, 2, 3]
    assert admitted(door(bound=None), [*replies, reply(4, **{spoiled: sign * 1e10})]) == [0, 1, 2, 3, 4]
    _, refused = door().admit(1, [*replies, reply(4, **{spoiled: sign * 1e10})], Sizes())
    assert refused[4] == f"its '{spoiled}' is 1e+10 times as large as usual, more than reply_bound allows (100)."


def test_of_two_replies_the_larger_is_refused_and_one_alone_is_not() -> None:
    assert admitted(door(), [reply(0, 1e10), reply(1)]) == [1]
    assert admitted(door(), [reply(0, 1e10)]) == [0]


def test_a_minority_can_not_make_itself_usual_nor_others_unusual() -> None:
    assert admitted(door(), [reply(0, 1e9), reply(1, 1e9), reply(2), reply(3), reply(4)]) == [2, 3, 4]
    assert admitted(door(), [reply(0, 0.0), reply(1, 0.0), reply(2, 50), reply(3, 50), reply(4, 50)]) == [0, 1, 2, 3, 4]


def test_earlier_rounds_tell_what_is_usual() -> None:
    sizes = Sizes()
    for round in range(1, 4):
        admitted(door(), [reply(0), reply(1)], sizes, round)
    assert admitted(door(), [reply(0, 1e4)], sizes, 4) == []
    assert admitted(door(), [reply(0, 1e4), reply(1, 1e4), reply(2)], sizes, 4) == [2]


def test_replies_may_grow_from_round_to_round() -> None:
    sizes = Sizes()
    for round in range(1, 20):
        assert admitted(door(), [reply(client, 2.0**round, 2.0**round) for client in range(3)], sizes, round)
    assert len(sizes.rounds) == REMEMBERED_ROUNDS


@pytest.mark.parametrize("zeros", [0.0, 1e-30])
def test_what_begins_at_zero_may_grow(zeros: float) -> None:
    assert admitted(door(), [reply(0, b=zeros), reply(1, b=zeros), reply(2, b=4.0)]) == [0, 1, 2]


def test_no_rows_are_no_size() -> None:
    empty = Reply(0, Message({"a": torch.zeros(0), "b": torch.ones(1)}))
    assert admitted(door(), [empty, reply(1)]) == [0, 1]


def test_what_is_remembered_survives_json() -> None:
    sizes = Sizes()
    admitted(door(), [reply(0), reply(1, 60.0), reply(2)], sizes, 3)
    assert sizes.unusual == [(3, 1, pytest.approx(60.0))]
    assert Sizes.from_dict(json.loads(json.dumps(sizes.to_dict()))) == sizes


def test_diverging_training_names_an_unusual_reply_of_the_last_rounds_only() -> None:
    sizes, guard = Sizes(), door()
    with pytest.raises(DivergedError, match="^it diverged.$"), guard.naming_causes(sizes):
        raise DivergedError("it diverged.")
    admitted(guard, [reply(0), reply(1), reply(2, 62.0)], sizes, 3)
    words = "it diverged; the reply of client 2 in round 3 was 62 times as large as usual and may be the cause "
    with pytest.raises(DivergedError) as caught, guard.naming_causes(sizes):
        raise DivergedError("it diverged.")
    assert str(caught.value) == words + "(--set reply_bound=31 refuses such replies)."
    for round in range(4, 4 + REMEMBERED_ROUNDS):
        admitted(guard, [reply(0), reply(1), reply(2)], sizes, round)
    with pytest.raises(DivergedError, match="^it diverged.$"), guard.naming_causes(sizes):
        raise DivergedError("it diverged.")


def test_factors_count_by_their_product() -> None:
    """FedKD: two factors that are each 60 times too large make a matrix that is 3600 times too large."""
    method = support.new_method("fedkd")
    like = dict(method.sized(Message(method.first_state())))  # type: ignore[attr-defined]
    name = max(like, key=lambda name: like[name].numel())
    rows, columns = like[name].shape

    def sent(factor: float) -> Message:
        factors = {f"{name}.left": torch.full((rows, 1), factor), f"{name}.right": torch.full((1, columns), factor)}
        return Message({**{other: t for other, t in like.items() if other != name}, **factors})

    replies = [Reply(client, sent(factor)) for client, factor in enumerate((1.0, 1.0, 60.0))]
    assert admitted(Door(method, 100), replies) == [0, 1]


def test_covariances_count_by_standard_deviations() -> None:
    """DC-PFL: features that are 50 times as large have covariances that are 2500 times as large."""
    method = support.new_method("dc-pfl")
    size = method.task.feature_size
    triangle = torch.eye(size)[tuple(torch.triu_indices(size, size))]

    def sent(factor: float) -> Message:
        tensors: dict[str, Tensor] = {"means": factor * torch.ones(1, size), "covariances": factor**2 * triangle[None]}
        return Message(tensors, {"labels": torch.tensor([0]), "counts": torch.tensor([9])})

    replies = [Reply(client, sent(factor)) for client, factor in enumerate((1.0, 1.0, 50.0, 101.0))]
    assert admitted(Door(method, 100), replies) == [0, 1, 2]
