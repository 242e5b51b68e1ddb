"""Messages: exact sizes, safe bytes, and checks that let nothing unsound through."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyfed.errors import BadMessage
from polyfed.message import Counts, Floats, Labels, Message, Schema, largest_each, snapshots

DTYPES = [
    torch.float32, torch.int64, torch.float64, torch.bool, torch.float16, torch.bfloat16, torch.int32, torch.uint8,
]  # fmt: skip
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda n: not n.startswith("metadata."))
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 12), max_size=3),
    st.sampled_from(DTYPES),
)
MESSAGES = st.builds(
    Message, st.dictionaries(NAMES, TENSORS, max_size=4), st.dictionaries(NAMES, TENSORS, min_size=1, max_size=3)
)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@settings(max_examples=150, deadline=None)
@given(MESSAGES)
@example(Message({"a": torch.zeros(1).double(), "b": torch.arange(200)}))  # types of one size have an order too
def test_bytes_are_counted_exactly_and_read_back(message: Message) -> None:
    data = message.to_bytes()
    assert message.nbytes == len(data)
    again = Message.from_bytes(data)
    assert same(dict(again.tensors), dict(message.tensors))
    assert same(dict(again.metadata), dict(message.metadata))


@pytest.mark.parametrize("name", ["gewicht.größe", "权重", 'a"b\\c\n', "\x7f\x01", "🙂"])
def test_any_name_is_counted(name: str) -> None:
    message = Message({name: torch.zeros(3)}, {name: torch.tensor([1])})
    assert message.nbytes == len(message.to_bytes())
    assert list(Message.from_bytes(message.to_bytes()).tensors) == [name]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    ],
)  # fmt: skip
def test_unusual_types_are_counted_read_back_and_refused(dtype: torch.dtype) -> None:
    data = Message({"a": torch.ones(3), "b": torch.zeros(3).to(dtype)}, {"c": torch.arange(2)}).to_bytes()
    message = Message.from_bytes(data)
    assert message.tensors["b"].dtype == dtype
    assert message.nbytes == len(data)
    assert message.snapshot().tensors["b"].dtype == dtype
    with pytest.raises(BadMessage, match="'b' is torch"):
        Schema({"a": Floats((3,)), "b": Floats((3,))}, {"c": Counts((2,))}).check(message)


NO_PLAIN_TENSORS: list[Any] = [
    torch.eye(3).to_sparse(), torch.zeros(10**9, 10**9, device="meta"), [1.0, 2.0], None, 3, "text",
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
]  # fmt: skip


@pytest.mark.parametrize("value", NO_PLAIN_TENSORS, ids=lambda value: type(value).__name__)
def test_what_is_no_plain_tensor_costs_nothing_and_is_refused(value: Any) -> None:
    rest = Message({"a": torch.ones(3)})
    for message in (Message({"a": torch.ones(3), "b": value}), Message({"a": torch.ones(3)}, {"b": value})):
        assert (message.floats, message.nbytes) == (3, rest.nbytes)
        assert message.snapshot().floats == 3
    with pytest.raises(BadMessage, match="'b' is not a plain tensor"):
        Schema({"a": Floats((3,)), "b": Floats((3,))}).check(Message({"a": torch.ones(3), "b": value}))
    with pytest.raises(BadMessage, match="'b' is not a plain tensor"):
        Schema({}, {"b": Counts((1,))}).check(Message({}, {"b": value}))


@pytest.mark.parametrize("name", ["\ud800", 7])
def test_names_that_no_file_can_have_cost_something_too(name: Any) -> None:
    message = Message({name: torch.zeros(3), "a": torch.zeros(1)})
    assert message.nbytes == 16
    with pytest.raises(BadMessage, match="unexpected tensor"):
        Schema().check(message)


def test_floats_do_not_count_metadata() -> None:
    message = Message({"a": torch.zeros(2, 5), "scalar": torch.tensor(1.0), "none": torch.zeros(0, 5)})
    assert message.floats == 11
    labelled = Message(message.tensors, {"labels": torch.arange(100)})
    assert labelled.floats == 11
    assert labelled.nbytes > message.nbytes + 800


def test_an_empty_message_costs_nothing() -> None:
    assert (Message().floats, Message().nbytes) == (0, 0)
    assert Message.from_bytes(Message().to_bytes()) == Message()


def test_views_and_tied_tensors_travel_whole() -> None:
    """Parts of one storage: safetensors by itself refuses those, and a transposed view."""
    whole = torch.arange(6.0).reshape(2, 3)
    message = Message({"whole": whole, "tied": whole, "row": whole[1], "turned": whole.T})
    again = Message.from_bytes(message.to_bytes())
    assert same(dict(again.tensors), dict(message.tensors))
    assert message.nbytes == len(message.to_bytes())


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda tail: (16).to_bytes(8, "little") + b"{" + tail))
def test_garbage_is_a_bad_message(data: bytes) -> None:
    with pytest.raises(BadMessage, match="safetensors"):
        Message.from_bytes(data)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200))
def test_a_truncated_message_is_a_bad_message(length: int) -> None:
    data = Message({"a": torch.arange(20.0)}, {"labels": torch.arange(3)}).to_bytes()
    with pytest.raises(BadMessage):
        Message.from_bytes(data[: min(length, len(data) - 1)])


def test_a_snapshot_shares_no_storage() -> None:
    weights, labels = torch.ones(3, requires_grad=True), torch.tensor([1])
    copy = Message({"w": weights}, {"labels": labels}).snapshot()
    with torch.no_grad():
        weights.zero_()
    labels.zero_()
    assert copy.tensors["w"].tolist() == [1.0] * 3
    assert not copy.tensors["w"].requires_grad
    assert copy.metadata["labels"].tolist() == [1]


def test_snapshots_of_many_messages_are_each_ones_own() -> None:
    """Each with its own values and memory; what is no plain tensor is left to the check."""
    shared = torch.arange(6.0)
    sparse = torch.zeros(2).to_sparse()
    messages = [
        Message({"a": shared[:2], "b": shared}, {"labels": torch.tensor([1])}),
        Message(),
        Message({"a": shared[2:4], "c": sparse}, {"labels": torch.tensor([2, 3])}),
    ]
    found = snapshots(messages)
    assert [same(dict(one.metadata), dict(two.metadata)) for one, two in zip(found, messages, strict=True)] == [
        True
    ] * 3
    assert [list(message.tensors) for message in found] == [["a", "b"], [], ["a", "c"]]
    assert found[2].tensors["c"] is sparse
    shared.zero_()
    assert found[0].tensors["a"].tolist() == [0, 1]
    assert found[2].tensors["a"].tolist() == [2, 3]
    places = [
        tensor.untyped_storage().data_ptr() for m in (found[0], found[2]) for n, tensor in m.tensors.items() if n != "c"
    ]
    assert len(set(places)) == 3


SCHEMA = Schema(
    {
        "vectors": Floats(("seen", 2)),
        "extra": Floats((), optional=True),
        "variances": Floats((2,), optional=True, negative=False),
    },
    {"labels": Labels(4), "counts": Counts(("seen",))},
)
VECTORS, LABELS, COUNTS = torch.ones(2, 2), torch.tensor([0, 3]), torch.tensor([5, 1])


def test_sound_messages_pass() -> None:
    SCHEMA.check(Message({"vectors": VECTORS}, {"labels": LABELS, "counts": COUNTS}))
    SCHEMA.check(
        Message({"vectors": VECTORS, "extra": torch.tensor(1.0)}, {"labels": LABELS, "counts": COUNTS}),
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    SCHEMA.check(Message({"vectors": torch.ones(0, 2)}, {"labels": nothing, "counts": nothing}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"surprise": VECTORS}, "unexpected tensor 'surprise'"),
        ({"vectors": None}, "lacks the tensor 'vectors'"),
        ({"labels": None}, "lacks the metadata entry 'labels'"),
        ({"vectors": VECTORS.double()}, "torch.float64, not torch.float32"),
        ({"labels": LABELS.int()}, "torch.int32, not torch.int64"),
        ({"vectors": torch.ones(2, 3)}, r"shape \(2, 3\), not \(2, 2\)"),
        ({"vectors": torch.ones(4)}, r"shape \(4,\)"),
        ({"counts": torch.tensor([1, 1, 1])}, r"'counts' has shape \(3,\), not \(2,\)"),
        ({"vectors": VECTORS * math.nan}, "not finite"),
        ({"vectors": VECTORS / 0}, "not finite"),
        ({"labels": torch.tensor([0, 4])}, "outside 0..3"),
        ({"labels": torch.tensor([-1, 2])}, "outside 0..3"),
        ({"labels": torch.tensor([3, 0])}, "ascending order"),
        ({"labels": torch.tensor([2, 2])}, "ascending order"),
        ({"counts": torch.tensor([5, 0])}, "below 1"),
        ({"counts": torch.tensor([5, 2**63 - 1])}, "a count above"),
        ({"variances": -torch.ones(2)}, "'variances' holds a negative variance"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Tensor | None], words: str) -> None:
    tensors = {"vectors": VECTORS, "labels": LABELS, "counts": COUNTS, **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    metadata = {name: kept.pop(name) for name in ("labels", "counts") if name in kept}
    with pytest.raises(BadMessage, match=words):
        SCHEMA.check(Message(kept, metadata))
    sound = Message({"vectors": VECTORS}, {"labels": LABELS, "counts": COUNTS})
    assert SCHEMA.passes([sound, sound, sound])
    assert not SCHEMA.passes([sound, Message(kept, metadata), sound])


@given(st.lists(st.lists(st.integers(-1, 4), max_size=4), max_size=4))
def test_labels_looked_at_together_pass_if_each_message_passes(labels: list[list[int]]) -> None:
    """A class of one message is never taken for one of the next: 4 of the first is not 0 of the second."""

    def passes(message: Message) -> bool:
        try:
            SCHEMA.check(message)
        except BadMessage:
            return False
        return True

    messages = [
        Message(
            {"vectors": torch.ones(len(own), 2)},
            {"labels": torch.tensor(own, dtype=torch.int64), "counts": torch.ones(len(own), dtype=torch.int64)},
        )
        for own in labels
    ]
    assert SCHEMA.passes(messages) == all(map(passes, messages))


@pytest.mark.parametrize("shapes", [[(2, 3)] * 3, [(2, 3), (0, 3), (1, 3)]])
def test_the_largest_value_of_each_tensor_is_its_own(shapes: list[tuple[int, int]]) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    tensors[0][0, 1], tensors[2][0, 2] = -3.0, math.nan
    first, second, third = largest_each([*tensors])
    assert (first, second) == (3.0, 0.0)
    assert math.isnan(third)


def test_a_schema_knows_how_large_a_message_can_be() -> None:
    """Ten classes of 4 floats, labels and counts: 160 + 80 + 80 bytes and a header; 200 rows are too many."""
    schema = Schema({"prototypes": Floats(("seen", 4))}, {"labels": Labels(10), "counts": Counts(("seen",))})
    most = schema.largest
    assert most is not None and 160 + 80 + 80 < most < 3000
    for rows in (1, 10):
        labels = torch.arange(rows)
        message = Message({"prototypes": torch.zeros(rows, 4)}, {"labels": labels, "counts": labels})
        assert message.nbytes == len(message.to_bytes()) <= most
    assert Message({"prototypes": torch.zeros(200, 4)}).nbytes > most


def test_a_rank_is_at_most_the_smaller_side_and_a_free_size_has_no_limit() -> None:
    """Factors of a 50 by 20 matrix: at most 50 · 20 + 20 · 20 floats, 5600 bytes."""
    factors = Schema({"left": Floats((50, "rank")), "right": Floats(("rank", 20))})
    assert factors.largest is not None and 5600 < factors.largest < 5600 + 2000
    assert Schema({"any": Floats(("size",))}).largest is None
