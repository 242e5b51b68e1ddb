"""Steps that a server keeps from round to round give the numbers of steps that are captured anew, and of plain ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed import compute
from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.errors import DivergedError
from polyfed.message import State
from polyfed.methods import fedtgp
from polyfed.methods.base import Method, Reply, Server
from polyfed.methods.parts import feature_generator
from polyfed.methods.parts.tools import cross_entropy
from polyfed.server import kept, replay, training
from polyfed.server.kept import Kept
from polyfed.server.training import Loss, eager, train_on_vectors
from tests import support
from tests.server.tape import Again, Tape

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where steps are captured")
GPU = torch.device("cuda")
CPU = torch.device("cpu")
SIZE, CLASSES = 6, 3
NUMBERS = (30, 30, 23, 47, 30, 23)
"""Vectors in each round: as many as before, fewer, more than there is room for, and numbers that come again."""


@pytest.fixture(params=[Tape, Again])
def graphs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """On a CPU, steps are captured as on a GPU."""
    pretend(monkeypatch, request.param)
    yield request.param.made
    request.param.made.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Again]]:
    """The same where a graph can only be a call that is made again: with our kernels, and with Adam."""
    pretend(monkeypatch, Again)
    yield Again.made
    Again.made.clear()


def pretend(monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
    monkeypatch.setattr(training, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(replay._Span, "_plain", replay._Span._take)
    monkeypatch.setattr(replay._Span, "_captured", lambda span: graph(span._take))
    graph.made.clear()


def capture_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few steps be worth a graph too, which are quickly made here."""
    monkeypatch.setattr(training, "worth_capturing", lambda orders, size, worth=0: training.quick(orders))


# Vectors --------------------------------------------------------------------------------------------------------------


def scaled_loss(module: nn.Module, vectors: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    return scale * cross_entropy(module(vectors), labels)


def new_module(deep: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 8), nn.ReLU(), nn.Linear(8, CLASSES)) if deep else nn.Linear(SIZE, CLASSES)


def one_round(
    module: nn.Module, number: int, count: int, own: Kept | None, loss: Loss | None = None, lr: float = 0.05
) -> list[float]:
    """What a round's training leaves behind, on vectors, labels and a scale that no other round has."""
    device, random = next(module.parameters()).device, torch.Generator().manual_seed(number)
    vectors = torch.randn(count, SIZE, generator=random).to(device)
    labels = torch.randint(CLASSES, (count,), generator=random).to(device)
    given = {} if loss is None else {"scale": torch.tensor(1.0 + number).to(device)}
    mean = train_on_vectors(
        module, vectors, labels, loss=loss, epochs=40, batch_size=5, lr=lr, generator=random, given=given, kept=own,
    )  # fmt: skip
    return [mean, *nn.utils.parameters_to_vector(module.parameters()).tolist()]


def rounds(loss: Loss | None, own: Kept | None, device: torch.device = CPU) -> list[list[float]]:
    module = new_module(deep=loss is not None).to(device)
    return [one_round(module, number, count, own, loss) for number, count in enumerate(NUMBERS)]


@pytest.mark.parametrize("loss", [None, scaled_loss])
def test_kept_steps_have_the_bits_of_new_ones_and_of_plain_ones(graphs: list[Any], loss: Loss | None) -> None:
    """A graph of four batches and one of what is left: twice six if captured anew.

    Kept, the second and the sixth round need none or one, and memory that is too small is dropped with its graphs.
    """
    with eager():
        plain = rounds(loss, None)
    assert graphs == []
    assert rounds(loss, None) == plain
    assert len(graphs) == 12
    graphs.clear()
    assert rounds(loss, Kept()) == plain
    assert len(graphs) == 8
    assert all(graph.replays for graph in graphs)


def test_what_is_in_spare_memory_is_never_used(graphs: list[Any]) -> None:
    own, module = Kept(), new_module(deep=True)
    found = [one_round(module, 0, 30, own, scaled_loss)]
    (steps,) = own._steps.values()
    assert len(steps.memory["vectors"]) == len(steps.memory["labels"]) == 37
    for name in ("vectors", "labels"):
        steps.memory[name][23:] = -(10**6)
    found.append(one_round(module, 1, 23, own, scaled_loss))
    plain = new_module(deep=True)
    with eager():
        assert found == [one_round(plain, number, count, None, scaled_loss) for number, count in ((0, 30), (1, 23))]


def test_a_module_that_has_moved_and_another_learning_rate_have_steps_of_their_own(graphs: list[Any]) -> None:
    own, module, plain = Kept(), new_module(deep=False), new_module(deep=False)
    there: list[Tensor] = []
    for number, lr in enumerate((0.05, 0.05, 0.01, 0.01, 0.05)):
        if number in (1, 3):
            for parameter in module.parameters():
                there.append(parameter.data)  # so that nothing else gets this memory
                parameter.data = parameter.data.clone()
        with eager():
            expected = one_round(plain, number, 30, None, lr=lr)
        assert one_round(module, number, 30, own, lr=lr) == expected
    assert len(own._steps) == 4  # the first and the second place with one rate, the second and the third with another
    assert len(graphs) == 10


def test_two_modules_do_not_share_steps(graphs: list[Any]) -> None:
    own, modules, plain = Kept(), [new_module(False), new_module(False)], new_module(False)
    with eager():
        expected = [one_round(plain, number, 30, None) for number in range(3)]
    for module in modules:
        assert [one_round(module, number, 30, own) for number in range(3)] == expected


def test_few_kinds_of_steps_are_kept(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    own, module = Kept(), new_module(deep=False)
    for number, lr in enumerate((0.1, 0.2, 0.1, 0.3)):
        one_round(module, number, 30, own, lr=lr)
    assert [key[0] for key in own._steps] == [("SGD", 0.1), ("SGD", 0.3)]  # type: ignore[index]
    own.close()
    assert not own._steps


# Methods --------------------------------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "fedtgp": {"server_epochs": 30, "server_batch_size": 2, "margin": "max-pair", "server_lr": 0.02},
    "fedgen": {"server_steps": 20, "server_batch": 6, "hidden": 5, "decay": 0.5, "server_lr": 0.03},
}
CLIENTS = (3, 3, 2, 4, 3, 2)
"""Who answers in each round."""


def sent(method: str, number: int, clients: int) -> list[Reply]:
    """Replies that no other round has; class 3 comes late."""
    random, replies = torch.Generator().manual_seed(number), []
    for client in range(clients):
        labels = [0, 1 + client % 2, *([3] if number > 2 else [])]
        head = {"weight": torch.randn(4, support.FEATURES, generator=random), "bias": torch.randn(4, generator=random)}
        tensors: State = {f"model.head.{name}": tensor for name, tensor in head.items()}
        if method == "fedtgp":
            tensors = {"prototypes": (1 + number) * torch.randn(len(labels), support.FEATURES, generator=random)}
            replies.append(support.reply(client, tensors, labels=labels))
        else:
            replies.append(support.reply(client, tensors, labels=labels, counts=[1 + number + client] * len(labels)))
    return replies


def new_server(name: str, device: torch.device = CPU) -> tuple[Method, Server]:
    method = support.new_method({"name": name, **METHODS[name]})
    server = support.new_server(method)
    server.device = device
    return method, server


def learned(name: str, device: torch.device = CPU, *, anew: bool = False) -> list[State]:
    """What the server knows and sends after each round."""
    method, server = new_server(name, device)
    found = []
    for number, clients in enumerate(CLIENTS, 1):
        server.round = number
        if anew:
            server.kept.close()
        method.aggregate(server, sent(name, number, clients))
        message = method.download(server, 0, None)
        state = {key: tensor.cpu().clone() for key, tensor in server.named_state().items()}
        found.append({**state, **message.tensors, **message.metadata})
        assert all(tensor.device == CPU for tensor in (*message.tensors.values(), *message.metadata.values()))
    assert server.notes == []
    server.kept.close()
    return found


INTERPRETED = pytest.param(
    True,
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels are not interpreted"),
)


@pytest.mark.parametrize("kernels", [INTERPRETED, False])
def test_fedtgp_learns_the_same_with_kept_steps(
    calls: list[Again], monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """By our kernels, which are interpreted here, and by autograd; there the bits are those of plain steps."""
    capture_few(monkeypatch)
    monkeypatch.setitem(METHODS["fedtgp"], "server_epochs", 6 if kernels else 30)
    if not kernels:
        monkeypatch.setattr(fedtgp, "separating_steps", lambda *given, **named: None)
    with eager():
        plain = learned("fedtgp")
    anew = learned("fedtgp", anew=True)
    most = len(calls)
    calls.clear()
    found = learned("fedtgp")
    assert 0 < len(calls) < most
    torch.testing.assert_close(found, anew, rtol=0, atol=0)
    torch.testing.assert_close(found, plain, **({"rtol": 1e-4, "atol": 1e-5} if kernels else {"rtol": 0, "atol": 0}))


def test_fedtgp_s_margin_is_that_of_the_round_in_a_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Tape)
    capture_few(monkeypatch)
    monkeypatch.setattr(fedtgp, "separating_steps", lambda *given, **named: None)
    # PyTorch's own looks at the labels' values on a CPU, and only there.
    monkeypatch.setattr(nn.functional, "one_hot", lambda labels, count: torch.eye(count, dtype=torch.int64)[labels])
    with eager():
        plain = learned("fedtgp")
    torch.testing.assert_close(learned("fedtgp"), plain, rtol=0, atol=0)
    assert Tape.made and all(tape.replays for tape in Tape.made)
    Tape.made.clear()


def test_fedgen_learns_the_same_with_kept_steps(calls: list[Again]) -> None:
    """Heads, counts, draws and the learning rate change, Adam starts afresh, batch norm's statistics go on.

    Three, two and four heads are three kinds of steps. The plain ones have a learning rate of 64 bits.
    """
    with eager():
        plain = learned("fedgen")
    anew = learned("fedgen", anew=True)
    assert len(calls) == len(CLIENTS)
    calls.clear()
    found = learned("fedgen")
    assert len(calls) == len(set(CLIENTS))
    torch.testing.assert_close(found, anew, rtol=0, atol=0)
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
    assert found[-1]["modules.generator.norm.num_batches_tracked"] == len(CLIENTS) * 20


def test_fedgen_sends_all_clients_the_same_tensors_and_new_ones_after_a_round() -> None:
    """What is loaded from a checkpoint is sent too, in place of what was sent before."""
    method, server = new_server("fedgen")
    messages = []
    for number in (1, 2):
        server.round = number
        method.aggregate(server, sent("fedgen", number, 3))
        messages.append([method.download(server, client, None) for client in range(2)])
        assert all(messages[-1][0].tensors[name] is tensor for name, tensor in messages[-1][1].tensors.items())
    first, second = messages[0][0].tensors, messages[1][0].tensors
    assert all(bool((first[name] != tensor).any()) for name, tensor in second.items())
    fresh = new_server("fedgen")[1]
    fresh.load(server.named_state())
    again = method.download(fresh, 0, None)
    assert again.tensors.keys() == second.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in second.items())
    server.load(new_server("fedgen")[1].named_state() | {"state.known": torch.ones(4, dtype=torch.bool)})
    assert bool(
        (method.download(server, 0, None).tensors["generator.last.weight"] != second["generator.last.weight"]).any()
    )


# Runs -----------------------------------------------------------------------------------------------------------------


def finished(folder: Path, name: str, **settings: Any) -> tuple[Any, Any]:
    """The rounds of a run of uneven clients who take part in turn, and its federation."""
    method = {"name": name, **METHODS[name]}
    given = {"clients": 6, "participation": 0.5, "rounds": 5, "partition": "dirichlet", "alpha": 0.5, **settings}
    made = support.federation(folder, method, **given)
    with closing(made.engine):
        made.run()
    return made.folder.rounds().drop(columns="seconds"), made


@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_kept_steps_is_that_without_and_leaves_none(
    tmp_path: Path, calls: list[Again], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two runs after another, too: the second knows nothing of the first."""
    capture_few(monkeypatch)
    monkeypatch.setattr(fedtgp, "separating_steps", lambda *given, **named: None)
    with eager():
        expected, plain = finished(tmp_path / "plain", name)
    runs = [finished(tmp_path / str(number), name) for number in range(2)]
    assert calls
    for actual, made in runs:
        torch.testing.assert_close(made.server.named_state(), plain.server.named_state(), rtol=1e-3, atol=1e-3)
        assert actual["loss_mean"].tolist() == pytest.approx(expected["loss_mean"].tolist(), rel=1e-5)
        assert not made.server.kept._steps
    torch.testing.assert_close(runs[0][1].server.named_state(), runs[1][1].server.named_state(), rtol=0, atol=0)


def test_a_run_that_fails_leaves_none(tmp_path: Path, calls: list[Again], monkeypatch: pytest.MonkeyPatch) -> None:
    made = support.federation(tmp_path, {"name": "fedgen", **METHODS["fedgen"]}, rounds=3)
    seen = []

    def broken(*given: object) -> None:
        seen.append(len(made.server.kept._steps))
        raise DivergedError("broken")

    monkeypatch.setattr("polyfed.methods.fedgen.check_finite", broken)
    with closing(made.engine), pytest.raises(DivergedError):
        made.run()
    assert seen == [1]
    assert not made.server.kept._steps


# GPU ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each capture on the GPU, whether it is a small one."""
    found: list[bool] = []
    original: Callable[..., Any] = compute.capturing

    def counted(graph: Any, **options: Any) -> Any:
        found.append(options["small"])
        return original(graph, **options)

    monkeypatch.setattr(replay, "capturing", counted)
    return found


@needs_gpu
@pytest.mark.parametrize("loss", [None, scaled_loss])
def test_kept_graphs_have_the_bits_of_new_ones_on_a_gpu(captures: list[bool], loss: Loss | None) -> None:
    anew = rounds(loss, None, GPU)
    assert captures == [True] * 12
    captures.clear()
    own = Kept()
    assert rounds(loss, own, GPU) == anew
    assert captures == [True] * 8
    with eager():
        for found, plain in zip(anew, rounds(loss, None, GPU), strict=True):
            assert found == pytest.approx(plain, rel=1e-3, abs=1e-4)
    own.close()


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
def test_methods_learn_the_same_with_kept_graphs_on_a_gpu(
    captures: list[bool], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Kept graphs have the bits of graphs that are captured anew in every round; plain steps agree."""
    capture_few(monkeypatch)
    anew = learned(name, GPU, anew=True)
    most = len(captures)
    captures.clear()
    found = learned(name, GPU)
    assert 0 < len(captures) < most
    torch.testing.assert_close(found, anew, rtol=0, atol=0)
    with eager():
        torch.testing.assert_close(found, learned(name, GPU), rtol=1e-2, atol=1e-2)


@needs_gpu
def test_many_numbers_of_rows_share_memory_though_old_graphs_are_dropped(
    captures: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for three graphs, each round's first one is gone in the next; its memory lives on in others."""
    monkeypatch.setattr(replay, "MOST_SPANS", 3)
    own, module, plain = Kept(), new_module(deep=True).to(GPU), new_module(deep=True).to(GPU)
    counts = [40, 23, 36, 29, 40, 23, 38, 31]
    found = [one_round(module, number, count, own, scaled_loss) for number, count in enumerate(counts)]
    made = len(captures)
    assert made > len(counts)
    assert [one_round(plain, number, count, None, scaled_loss) for number, count in enumerate(counts)] == found
    own.close()


@needs_gpu
@pytest.mark.parametrize("clients", [20, 7])
def test_fedgen_s_server_at_its_usual_size_has_the_bits_of_graphs_captured_anew(clients: int) -> None:
    """Features of 500, 512 hidden units, 50 steps of 32: what cuBLAS chooses for large products is the same too."""
    states = []
    for anew in (True, False):
        torch.manual_seed(0)
        generator, own = feature_generator.ServerGenerator(10, 500, 32, 512).to(GPU), Kept()
        for number in range(4):
            if anew:
                own.close()
            random = torch.Generator().manual_seed(number)
            heads = {"weight": torch.randn(clients, 10, 500, generator=random), "bias": torch.randn(clients, 10)}
            heads["bias"] = torch.randn(clients, 10, generator=random)
            counts, notes = torch.randint(1, 9, (clients, 10), generator=random).double(), list[str]()
            feature_generator.train_generator(
                generator, nn.Linear(500, 10), heads, counts, steps=50, batch_size=32, lr=3e-4 * 0.98**number,
                random=random, notes=notes, kept=own,
            )  # fmt: skip
            assert notes == []
        states.append({name: tensor.cpu() for name, tensor in generator.state_dict().items()})
        own.close()
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@needs_gpu
@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
@pytest.mark.parametrize("name", METHODS)
def test_runs_on_a_gpu_free_their_graphs(
    tmp_path: Path, captures: list[bool], monkeypatch: pytest.MonkeyPatch, name: str, engine: Any
) -> None:
    capture_few(monkeypatch)
    settings = {"device": "cuda", "tf32": False, "engine": engine}
    expected = None
    for within in (eager(), nullcontext()):
        with within:
            actual, made = finished(tmp_path / str(expected is None), name, **settings)
        assert not [note for note in made.folder.notes() if "can't be captured" in note]
        if expected is None:
            expected = actual
    assert captures
    assert expected is not None
    assert actual["loss_mean"].tolist() == pytest.approx(expected["loss_mean"].tolist(), rel=1e-2)
    assert not made.server.kept._steps
    del made
    gc.collect()
    assert not compute._GRAPHS


@needs_gpu
def test_a_round_of_kept_steps_waits_for_the_gpu_a_few_times() -> None:
    """As often with many clients as with few: once the steps are captured, nothing is waited for but their results."""
    found = []
    for clients in (3, 24):
        method, server = new_server("fedgen", GPU)
        for number in range(1, 4):
            server.round = number
            replies = sent("fedgen", number, clients)
            torch.cuda.set_sync_debug_mode("warn" if number == 3 else "default")
            try:
                with pytest.warns(UserWarning) if number == 3 else nullcontext() as warned:
                    method.aggregate(server, replies)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert warned is not None
        found.append(sum("synchroniz" in str(each.message) for each in warned))
        server.kept.close()
    assert found[0] == found[1] < 20
