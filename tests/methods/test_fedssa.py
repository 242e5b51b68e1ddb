"""FedSSA, with numbers worked out by hand."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

from polyfed.errors import BadMessage, InputError
from polyfed.message import Message, State
from polyfed.methods.base import Knowledge, Method
from polyfed.models import SplitNetwork
from polyfed.server.federation import Federation
from tests import support
from tests.methods import parity

WIDTH = support.FEATURES + 1  # a row is a class's weights and its bias


class NoBias(support.Wide):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.out = nn.Linear(support.FEATURES, classes, bias=False)


class TwoLayerHead(SplitNetwork):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        extractor = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), support.FEATURES))
        head = nn.Sequential(nn.Linear(support.FEATURES, 5), nn.ReLU(), nn.Linear(5, classes))
        super().__init__(extractor, head, support.FEATURES)


class NormedHead(support.Wide):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(support.FEATURES, classes))


def rows(*values: float, width: int = WIDTH) -> Tensor:
    """Rows of a head that hold one value each."""
    return torch.tensor([float(value) for value in values])[:, None].expand(-1, width).clone()


def head(*values: float) -> State:
    """A client's head with one value per class."""
    return {"model.head.weight": rows(*values, width=support.FEATURES), "model.head.bias": rows(*values)[:, 0]}


def fused(method: Method, round: int, own: State, message: Message, counts: list[int]) -> list[float]:
    """The head's row values after a download; each row must still hold one value."""
    state = {**own, **method.receive(own, message, Knowledge(torch.tensor(counts), round))}
    assert all(torch.equal(weights, bias.expand(len(weights))) for weights, bias in zip(*state.values(), strict=True))
    bias: list[float] = state["model.head.bias"].tolist()
    return bias


def test_rows_are_averaged_by_class_over_their_holders() -> None:
    """Class 1 has rows 2 and 4: the mean is 3. Class 0 has one owner: its own row. Nobody holds classes 2 and 3."""
    method = support.new_method("fedssa")
    server = support.new_server(method)
    first = support.reply(0, {"rows": rows(7, 2)}, labels=[0, 1])
    second = support.reply(1, {"rows": rows(4)}, labels=[1])
    method.aggregate(server, [first, second])
    message = method.download(server, 0, torch.tensor([0, 1, 2]))
    assert message.metadata["labels"].tolist() == [0, 1]
    assert message.tensors["rows"].tolist() == rows(7, 3).tolist()
    assert method.download(server, 1, torch.tensor([2, 3])).nbytes == 0


@pytest.mark.parametrize(("holders", "expected"), [("all", 4.0), ("participants", 5.0)])
def test_absent_holders_count_with_their_latest_rows(holders: str, expected: float) -> None:
    """Class 1: client 0 sent 1, then 3; client 1 sends 5 in round 2 alone. All: (3 + 5) / 2; participants: 5.

    Class 0, which client 0 alone holds, keeps its row while client 0 is away.
    """
    method = support.new_method({"name": "fedssa", "holders": holders})
    server = support.new_server(method)
    method.aggregate(server, [support.reply(0, {"rows": rows(9, 1)}, labels=[0, 1])])
    method.aggregate(server, [support.reply(0, {"rows": rows(8, 3)}, labels=[0, 1])])
    method.aggregate(server, [support.reply(1, {"rows": rows(5)}, labels=[1])])
    assert method.download(server, 0, torch.tensor([0, 1])).tensors["rows"].tolist() == rows(8, expected).tolist()


def test_own_share_follows_a_cosine_to_zero() -> None:
    """mu_0 = 0.5, T_stable = 4: 0.5 cos(pi t / 8) is .4619, .3536, .1913 in rounds 1 to 3, and exactly 0 from 4 on."""
    method = support.new_method({"name": "fedssa", "history": 0.5, "stable_round": 4})
    own = [method.own_share(round) for round in range(1, 7)]
    assert own == pytest.approx([0.461940, 0.353553, 0.191342, 0, 0, 0], abs=1e-6)
    assert own[3:] == [0, 0, 0]


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("linear", [0.375, 0.25, 0.125, 0, 0]),
        ("exponential", [0.158114, 0.05, 0.015811, 0, 0]),
        ("constant", [0.5, 0.5, 0.5, 0, 0]),
    ],
)
def test_other_decays(decay: str, expected: list[float]) -> None:
    """mu_0 = 0.5, T_stable = 4. Linear: 0.5 (1 − t/4); exponential: 0.5 · 0.01^(t/4), in round 2 a tenth of 0.5."""
    method = support.new_method({"name": "fedssa", "history": 0.5, "stable_round": 4, "decay": decay})
    assert [method.own_share(round) for round in range(1, 6)] == pytest.approx(expected, abs=1e-6)


def test_whole_heads_are_averaged_over_all_clients() -> None:
    """Rows (1, 2, 3, 4) and (5, 2, 7, 0.5): the means (3, 2, 5, 2.25), whoever has the classes, and all are received.

    Round 2 with share 0.25: mean + 0.25 · own.
    """
    method = support.new_method({"name": "fedssa", "average": "head", "history": 0.5, "stable_round": 3})
    server = support.new_server(method)
    assert not method.announces_classes
    uploads = [
        method.upload(support.trained(counts, head(*values)))
        for counts, values in (([0, 3, 0, 1], (1, 2, 3, 4)), ([0, 1, 0, 0], (5, 2, 7, 0.5)))
    ]
    for upload in uploads:
        method.check(upload)
    method.aggregate(server, [support.reply(number, upload.tensors) for number, upload in enumerate(uploads)])
    message = method.download(server, 0, None)
    assert message.tensors["head"].tolist() == rows(3, 2, 5, 2.25).tolist()
    assert fused(method, 2, head(1, 2, 3, 4), message, [0, 3, 0, 1]) == pytest.approx([3.25, 2.5, 5.75, 3.25])
    with pytest.raises(InputError, match="full_header.*average=head.*leave out one"):
        support.new_method({"name": "fedssa", "average": "head", "full_header": True})


@pytest.mark.parametrize(("history", "equal"), [(0.0, True), (0.5, False)])
def test_single_owners_without_history_train_as_if_alone(tmp_path, history: float, equal: bool) -> None:
    """One owner per class: the global row is the owner's own, bit by bit, so nothing differs from Standalone.

    With a history rows grow, and that is all that differs.
    """
    ssa = {"name": "fedssa", "history": history}
    settings = {"classes_per_client": 1, "participation": 0.75, "rounds": 5}
    runs = [
        support.federation(tmp_path / name, method, **settings) for name, method in (("a", ssa), ("b", "standalone"))
    ]
    for run in runs:
        run.run()
    pairs = [[run.engine.get_state(client) for run in runs] for client in range(4)]
    same = all(torch.equal(one[name], tensor) for one, other in pairs for name, tensor in other.items())
    assert same == equal


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"history": 0.0}, 10.0),
        ({"history": 0.5, "stable_round": 2}, 10.0),
        ({"history": 0.5, "stable_round": 3}, 11.0),
        ({"history": 0.5, "stable_round": 3, "convex": True}, 8.5),
    ],
)
def test_seen_rows_are_fused_and_unseen_rows_stay(options: dict, expected: float) -> None:
    """Round 2, own row 4, global row 10. Share 0: the global row. Share 0.5 cos(pi/3) = 0.25: 10 + 0.25·4 = 11, or
    0.75·10 + 0.25·4 = 8.5 if convex. Class 0 is unseen, class 2 has no global row yet: both stay.
    """
    method = support.new_method({"name": "fedssa", **options})
    message = Message({"rows": rows(10, 10)}, {"labels": torch.tensor([1, 3])})
    result = fused(method, 2, head(1, 4, 2, 4), message, [0, 5, 5, 5])
    assert result == pytest.approx([1, expected, 2, expected])


def test_row_of_a_single_owner_grows() -> None:
    """The global row is its own row r, so r becomes r + 0.25 r; convex leaves it at r."""
    for convex, expected in ((False, 5.0), (True, 4.0)):
        method = support.new_method({"name": "fedssa", "stable_round": 3, "convex": convex})
        server = support.new_server(method)
        own = head(1, 4, 2, 3)
        upload = method.upload(support.trained([0, 6, 0, 0], own)).snapshot()
        method.aggregate(server, [support.reply(0, upload.tensors, labels=upload.metadata["labels"].tolist())])
        message = method.download(server, 0, torch.tensor([1]))
        assert fused(method, 2, own, message, [0, 6, 0, 0]) == pytest.approx([1, expected, 2, 3])


def test_first_round_leaves_the_local_head() -> None:
    method = support.new_method("fedssa")
    message = method.download(support.new_server(method), 0, torch.tensor([0, 1]))
    assert message.nbytes == 0
    assert method.receive(head(1, 2, 3, 4), message, Knowledge(torch.tensor([1, 1, 0, 0]), 1)) == {}


def test_upload_holds_the_rows_of_seen_classes_only() -> None:
    method = support.new_method("fedssa")
    message = method.upload(support.trained([0, 3, 0, 1], head(1, 2, 3, 4)))
    assert message.tensors["rows"].tolist() == rows(2, 4).tolist()
    assert message.metadata["labels"].tolist() == [1, 3]
    method.check(message)


def test_full_header_hides_the_list_and_fuses_alike() -> None:
    """Rows of other classes are zeros up, unknown rows zeros down; only rows that are not zero count in the mean."""
    method = support.new_method({"name": "fedssa", "full_header": True, "history": 0.0})
    server = support.new_server(method)
    assert not method.announces_classes
    assert method.download(server, 0, None).nbytes == 0
    uploads = [
        method.upload(support.trained(counts, head(*values)))
        for counts, values in (([0, 3, 0, 1], (1, 2, 3, 4)), ([0, 1, 0, 0], (9, 6, 9, 9)))
    ]
    assert uploads[0].tensors["head"].tolist() == rows(0, 2, 0, 4).tolist()
    assert not uploads[0].metadata
    method.aggregate(server, [support.reply(number, upload.tensors) for number, upload in enumerate(uploads)])
    message = method.download(server, 0, None)
    assert message.tensors["head"].tolist() == rows(0, 4, 0, 4).tolist()
    assert fused(method, 2, head(1, 2, 3, 7), message, [1, 1, 0, 0]) == [1, 4, 3, 7]
    method.check(uploads[0])


def test_head_without_bias(tmp_path) -> None:
    run = support.federation(tmp_path, "fedssa", models=(NoBias,), rounds=3)
    run.run()
    assert run.folder.rounds().upload_floats.tolist() == [4 * 2 * support.FEATURES] * 3


def test_head_of_several_layers_is_refused() -> None:
    with pytest.raises(InputError, match="one linear layer.*TwoLayerHead is of type Sequential"):
        support.population("fedssa", models=(TwoLayerHead,))
    with pytest.raises(InputError, match="one linear layer.*NormedHead is of type ParametrizedLinear"):
        support.population("fedssa", models=(NormedHead,))
    with pytest.raises(InputError, match="the same head"):
        support.population("fedssa", models=(support.Wide, NoBias))


def test_replies_with_unsound_rows_are_refused() -> None:
    method = support.new_method("fedssa")
    for tensors, labels, reason in (
        (rows(math.nan), [0], "finite"),
        (rows(1), [4], "outside"),
        (rows(1, width=WIDTH - 1), [0], "shape"),
        (rows(1, 2), [1], "shape"),
        (rows(1, 2), [1, 1], "ascending"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message({"rows": tensors}, {"labels": torch.tensor(labels)}))
    whole = support.new_method({"name": "fedssa", "full_header": True})
    with pytest.raises(BadMessage, match="shape"):
        whole.check(Message({"head": rows(1, 2, 3)}))


def test_rows_that_may_grow_far_are_noted_once(tmp_path) -> None:
    """T_stable = 12, 3 rounds: global rows come in rounds 2 and 3, (1 + .5 cos(pi/12)) (1 + .5 cos(pi/8)) = 2.17."""
    for convex, expected in ((False, 1), (True, 0)):
        method = {"name": "fedssa", "stable_round": 12, "convex": convex}
        run = support.federation(tmp_path / str(convex), method, rounds=3)
        run.run()
        lines = (run.folder.path / "events.jsonl").read_text().splitlines()
        notes = [event["note"] for event in map(json.loads, lines) if event["event"] == "note"]
        assert len(notes) == expected
        assert all("2.17-fold" in note for note in notes)
    assert not support.new_method({"name": "fedssa", "stable_round": 10}, rounds=20).growth_note()
    (note,) = support.new_method({"name": "fedssa", "stable_round": 10, "decay": "constant"}, rounds=20).growth_note()
    assert "25.6-fold" in note  # 1.5 to the power of 8, for rounds 2 to 9


def test_global_rows_are_no_clients_own(tmp_path) -> None:
    """After a round the server holds means: they differ from the rows of every client that shares the class."""
    run = support.federation(tmp_path, "fedssa", classes_per_client=4, rounds=1)
    run.run()
    for client in range(4):
        own = run.server.state[f"client.{client}.rows"]
        assert not torch.allclose(own, run.server.state["rows.vectors"])
        assert torch.equal(own[:, -1], run.engine.get_state(client)["model.head.bias"])


def test_server_goes_on_after_a_checkpoint(tmp_path) -> None:
    run = support.federation(tmp_path / "first", "fedssa", participation=0.5, rounds=4)
    for number in (1, 2):
        run.round(number)
    run.checkpoint()
    saved = run.folder.checkpoints.restore()
    assert saved is not None
    again = support.federation(tmp_path / "second", "fedssa", participation=0.5, rounds=4)
    again.restore(saved)
    last = [finish(one) for one in (run, again)]
    assert all(torch.equal(last[0][name], tensor) for name, tensor in last[1].items())


def finish(run: Federation) -> State:
    run.run()
    return run.server.state


def test_stable_client_takes_global_rows_bit_by_bit(tmp_path) -> None:
    """From stable_round on, seen rows are the server's and all others the client's own, after real training too."""
    run = support.federation(tmp_path, "fedssa", rounds=2)
    run.run()
    client = run.engine.population.knowledge(0, round=4)
    own = {name: tensor.clone() for name, tensor in run.engine.get_state(0).items()}
    changed = run.method.receive(own, run.download(0), client)
    seen, server = client.counts > 0, run.server.state["rows.vectors"]
    for name, expected in (("model.head.weight", server[:, :-1]), ("model.head.bias", server[:, -1])):
        assert torch.equal(changed[name][seen], expected[seen])
        assert torch.equal(changed[name][~seen], own[name][~seen])


@pytest.mark.parametrize(
    "options", [{}, {"full_header": True}, {"holders": "participants", "convex": True}, {"average": "head"}]
)
def test_engines_agree(tmp_path, options: dict) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "fedssa", **options}, participation=0.75)


def test_loss_agrees_under_vmap() -> None:
    parity.assert_vmap_agrees(support.population("fedssa"))


def test_clients_share_no_storage(tmp_path) -> None:
    parity.assert_nothing_shared(tmp_path, "fedssa")


@pytest.mark.parametrize(("classes", "rows_", "full"), [(10, 1_002, 5_010), (100, 5_010, 50_100)])
def test_traffic_is_the_closed_form(tmp_path, classes: int, rows_: int, full: int) -> None:
    assert support.traffic(tmp_path, "fedssa", classes) == (rows_, rows_)
    whole = {"name": "fedssa", "full_header": True}
    assert support.traffic(tmp_path / "full", whole, classes) == (full, full)


def test_it_learns(tmp_path) -> None:
    assert support.federation(tmp_path, "fedssa", rounds=4, epochs=2).run()["accuracy_final"] > 0.9
