"""Class Gaussians, against what the samples put together would give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyfed.methods.base import Server
from polyfed.methods.parts.gaussians import (
    Gaussians,
    Noise,
    NoiseAhead,
    Wanted,
    diagonals,
    draw,
    factors,
    in_proportion,
    pack,
    pool,
    possible,
)
from polyfed.methods.parts.statistics import class_covariances

SIZE = 7


def samples(*counts: int) -> list[Tensor]:
    """Features of several clients, each with a mean of its own, in float64."""
    generator = torch.Generator().manual_seed(1)
    return [
        3 * client + torch.randn(count, SIZE, generator=generator, dtype=torch.float64)
        for client, count in enumerate(counts)
    ]


def covariance(features: Tensor) -> Tensor:
    return torch.cov(features.T) if len(features) > 1 else torch.zeros(SIZE, SIZE, dtype=features.dtype)


def sent_by(clients: list[Tensor], labels: list[int]) -> Gaussians:
    counts = torch.tensor([len(features) for features in clients])
    means = torch.stack([features.mean(0) for features in clients])
    return Gaussians(torch.tensor(labels), counts, means, pack(torch.stack([covariance(f) for f in clients])))


def noise(sent: Gaussians, amounts: list[int]) -> Noise:
    generator = torch.Generator().manual_seed(0)
    return Noise(Wanted.of(sent.labels, sent.counts, torch.tensor(amounts), sent.means.shape[1]), generator)


def pooled(clients: list[Tensor], **options: bool) -> tuple[Tensor, Tensor]:
    """Mean and covariance of class 1, which all these clients hold."""
    sent = sent_by(clients, [1] * len(clients))
    means, rows = pool(sent, factors(sent.triangles, SIZE, int(sent.counts.max()) - 1), 3, **options)
    factor = rows.flatten(0, 1)
    return means[1], factor.T @ factor


@pytest.mark.parametrize("counts", [(5, 3), (40, 1, 12), (1, 1), (2, 30, 4, 1), (100,)])
def test_pooled_covariance_is_that_of_all_samples(counts: tuple[int, ...]) -> None:
    clients = samples(*counts)
    together = torch.cat(clients)
    mean, found = pooled(clients)
    torch.testing.assert_close(mean, together.mean(0), rtol=0, atol=1e-10)
    torch.testing.assert_close(found, torch.cov(together.T), rtol=0, atol=1e-10)


def test_weights_as_printed_overestimate_by_the_sum_of_covariances() -> None:
    """Σ_i n_i Σ_i − Σ_i (n_i − 1) Σ_i = Σ_i Σ_i, divided by n − 1 = 16."""
    clients = samples(9, 1, 7)
    _, right = pooled(clients)
    _, printed = pooled(clients, paper_weights=True)
    torch.testing.assert_close(printed - right, sum(map(covariance, clients)) / 16, rtol=0, atol=1e-10)


def test_pooled_by_hand() -> None:
    """Samples 1, 3 here and 8 there: mean 4, covariance (9 + 1 + 16) / 2 = 13.

    From the parts: (2 − 1) · 2 + 2 · (2 − 4)² + (1 − 1) · 0 + 1 · (8 − 4)² = 26, over n − 1 = 2. With the printed
    weights 2 · 2 + 8 + 1 · 0 + 16 = 28, over 2.
    """
    sent = Gaussians(
        torch.tensor([0, 0]), torch.tensor([2, 1]), torch.tensor([[2.0], [8.0]]), torch.tensor([[2.0], [0.0]])
    )
    for paper_weights, expected in ((False, 13.0), (True, 14.0)):
        means, rows = pool(sent, factors(sent.triangles, 1, 1), 1, paper_weights=paper_weights)
        assert means.tolist() == [[4.0]]
        assert float(rows.square().sum()) == pytest.approx(expected)


def test_classes_are_pooled_apart() -> None:
    clients = samples(4, 3, 5)
    sent = sent_by(clients, [2, 0, 2])
    means, rows = pool(sent, factors(sent.triangles, SIZE, 4), 3)
    together = torch.cat([clients[0], clients[2]])
    torch.testing.assert_close(means[2], together.mean(0))
    torch.testing.assert_close(means[0], clients[1].mean(0))
    assert not means[1].any()
    factor = torch.cat([rows[0], rows[2]])
    torch.testing.assert_close(factor.T @ factor, torch.cov(together.T))


def test_one_sample_alone_has_no_covariance() -> None:
    mean, found = pooled(samples(1))
    assert torch.equal(mean, samples(1)[0][0])
    assert not found.any()


def test_factor_of_a_singular_covariance_is_exact_and_small() -> None:
    """Three samples in seven dimensions: rank 2, so two rows are all of it."""
    triangles = pack(torch.stack([covariance(features) for features in samples(3, 3)]))
    found = factors(triangles, SIZE, rank=2)
    assert found.shape == (2, 2, SIZE)
    torch.testing.assert_close(pack(found.mT @ found), triangles, rtol=0, atol=1e-12)


def test_factor_of_a_rounded_covariance_stays_near_it() -> None:
    """In float32 a singular covariance is slightly indefinite; a rank that is too large must not feed on rounding."""
    matrix = torch.cov(samples(4)[0].T).float()
    found = factors(pack(matrix[None]), SIZE, rank=500)[0]
    assert found.shape == (SIZE, SIZE)
    assert float((found.T @ found - matrix).abs().max()) < 1e-5 * float(matrix.max())


def test_factor_of_what_is_no_covariance_is_finite() -> None:
    wrong = torch.tensor([[[0.0, 5.0], [5.0, 0.0]], [[1.0, 2.0], [2.0, 1.0]]])
    assert torch.isfinite(factors(pack(wrong), 2, 2)).all()


def test_diagonals_of_packed_matrices() -> None:
    matrix = torch.arange(9.0).reshape(1, 3, 3)
    assert pack(matrix).tolist() == [[0.0, 1.0, 2.0, 4.0, 5.0, 8.0]]
    assert diagonals(pack(matrix), 3).tolist() == [[0.0, 4.0, 8.0]]


def test_draws_have_the_pooled_mean_and_covariance() -> None:
    """100 000 draws of a class of two clients with 2 and 3 samples in seven dimensions: rank 4 at most.

    The error of a mean is about the deviation (at most 4 here) over √100 000, 0.013; that of a covariance about the
    variance times √(2 / 100 000), 0.07: five times that is allowed.
    """
    clients = samples(2, 3)
    together = torch.cat(clients)
    exact = sent_by(clients, [1, 1])
    sent = exact._replace(means=exact.means.float(), triangles=exact.triangles.float())
    vectors, labels = draw(sent, noise(sent, [0, 100_000]))
    assert torch.linalg.matrix_rank(torch.cov(together.T)) == 4
    assert labels.unique().tolist() == [1]
    assert float((vectors.mean(0) - together.mean(0)).abs().max()) < 0.07
    assert float((torch.cov(vectors.T) - torch.cov(together.T)).abs().max()) < 0.35
    assert torch.linalg.matrix_rank(torch.cov(vectors.double().T), atol=1e-4) == 4


def test_draws_follow_amounts_and_class_order() -> None:
    triangles = torch.zeros(3, 3)
    means = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
    sent = Gaussians(torch.tensor([0, 2, 2]), torch.tensor([1, 1, 1]), means, triangles)
    vectors, labels = draw(sent, noise(sent, [2, 0, 3]))
    assert labels.tolist() == [0, 0, 2, 2, 2]
    assert vectors[:2].tolist() == [[1.0, 1.0]] * 2  # one sample: its Gaussian is a point
    # Samples 2 and 4 of two clients: mean 3, along one direction only.
    assert torch.allclose(vectors[2:, 0], vectors[2:, 1])
    assert vectors[2:, 0].unique().numel() == 3


@pytest.mark.parametrize("scale", [1e-25, 1e-6, 1.0, 1e6])
def test_covariances_of_samples_are_possible(scale: float) -> None:
    """Also of features that are alike, that never change, and that are too small for a variance in floats."""
    features = samples(30)[0].float()
    features[:, 1], features[:, 2], features[:, 3] = 2 * features[:, 0], 5.0, 1e-24 * features[:, 0]
    found = class_covariances(scale * features, torch.zeros(30, dtype=torch.int64), 1)
    assert found.covariances is not None
    assert possible(pack(found.covariances), SIZE)


@pytest.mark.parametrize("variance", [0.0, 1e-9, 1.0])
def test_a_covariance_beyond_its_variances_is_not_possible(variance: float) -> None:
    matrix = torch.eye(SIZE)
    matrix[2, 2] = variance
    assert possible(pack(torch.stack([torch.eye(SIZE), matrix])), SIZE)
    matrix[2, 4] = matrix[4, 2] = -(1.01 * variance**0.5 + 1e-4)
    assert not possible(pack(torch.stack([torch.eye(SIZE), matrix])), SIZE)


def no_covariance(size: int) -> tuple[Tensor, float]:
    """A packed matrix whose pairs of features are possible, but not all together; and its largest deviation."""
    generator = torch.Generator().manual_seed(4)
    rows, columns = torch.triu_indices(size, size)
    signs = torch.where(rows == columns, 1.0, torch.randint(0, 2, rows.shape, generator=generator) * 1.998 - 0.999)
    deviations = 10 ** (-3 * torch.rand(size, generator=generator))
    return (deviations[rows] * deviations[columns] * signs)[None], float(deviations.max())


def test_factors_of_what_is_no_covariance_stay_small() -> None:
    triangles, deviation = no_covariance(60)
    assert possible(triangles, 60)
    assert float(factors(triangles, 60, 60).abs().max()) <= 1.1 * deviation


def test_shares_by_hand() -> None:
    """10 over counts 5, 3, 1, 0: quotas 50/9, 30/9, 10/9 = 5 + 5/9, 3 + 3/9, 1 + 1/9; the one left goes to 5/9."""
    assert in_proportion(torch.tensor([5, 3, 1, 0]), 10).tolist() == [6, 3, 1, 0]
    assert in_proportion(torch.tensor([7, 7]), 1).tolist() == [1, 0]


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=120).filter(any), st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_shares_sum_exactly_and_are_nearest(counts: list[int], total: int) -> None:
    found = in_proportion(torch.tensor(counts), total).tolist()
    assert sum(found) == total
    assert all(abs(share - count * total / sum(counts)) < 1 for share, count in zip(found, counts, strict=True))


def test_class_covariances_are_unbiased_and_in_order() -> None:
    """Class 2 with 12 samples, class 0 with one (covariance zero), class 1 with none."""
    features = samples(13)[0].float()
    labels = torch.tensor([2] * 5 + [0] + [2] * 7)
    found = class_covariances(features, labels, 3)
    assert found.labels.tolist() == [0, 2]
    assert found.counts.tolist() == [1, 12]
    assert found.covariances is not None
    assert not found.covariances[0].any()
    torch.testing.assert_close(found.covariances[1], torch.cov(features[labels == 2].T))
    torch.testing.assert_close(found.means[1], features[labels == 2].mean(0))


def test_noise_drawn_aside_and_in_advance_is_the_same() -> None:
    """Only the third round in a row with the same amounts finds its noise ready; one that wants other amounts does not.

    17 · 3 + 0 + 5 · 12 draws; parts of fewer than 16 and of no multiple of 16 are drawn in other ways.
    """
    clients = samples(3, 1, 2, 3, 2)
    sent = sent_by(clients, [0, 2, 2, 2, 2])
    wanted = Wanted.of(sent.labels, sent.counts, torch.tensor([17, 0, 5]), SIZE)
    assert wanted.shapes == [(17, 3), (0, 0), (5, 12)]
    other = Wanted.of(sent.labels, sent.counts, torch.tensor([1, 0, 2]), SIZE)
    ahead = NoiseAhead()
    rows = torch.zeros(1, dtype=torch.float64)
    for round, now in enumerate([wanted, wanted, wanted, other, wanted], 1):
        server = Server(seed=3, round=round)
        found = ahead.of(server, now, aside=True)
        assert (ahead._next is not None and found is ahead._next[1]) is (round == 3)
        plain = Noise(now, server.generator("virtual features"))
        for one, two in zip(found.like(rows), plain.like(rows), strict=True):
            assert one.dtype == torch.float64
            assert torch.equal(one, two)
        ahead.draw_next(server, now)


def test_noise_in_advance_is_not_used_with_another_seed() -> None:
    wanted, ahead = Wanted((4,), (1,), 2), NoiseAhead()
    for round in (1, 2):
        ahead.draw_next(Server(seed=0, round=round), wanted)
    zeros = torch.zeros(1)
    expected, other = (next(ahead.of(Server(seed=s, round=3), wanted, aside=False).like(zeros)) for s in (0, 1))
    assert torch.equal(expected, torch.randn(4, 3, generator=Server(seed=0, round=3).generator("virtual features")))
    assert not torch.equal(expected, other)
