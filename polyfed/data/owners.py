"""Who owns which sample: one pure function per kind of partition, from labels to an owner per sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyfed.data.splits import Integers
from polyfed.errors import InputError, counted

NOBODY = -1
"""The owner of a sample that stays unused."""


def default_minimum(samples: int, clients: int) -> int:
    """The fewest samples per client in PFLlib's partitions: 40, or half of an even share if that is less."""
    return max(1, min(40, samples // (2 * clients)))


@dataclass(frozen=True)
class SharePlan:
    """Who gets which share of which class, as fractions: it can be applied to several pools of samples."""

    owners: dict[int, Integers]
    """Per class that is distributed, the clients that own a share of it."""
    shares: dict[int, NDArray[np.float64]]
    """Per class, these clients' shares; they sum to one."""


def plan_shares(
    present: Integers,
    clients: int,
    classes_per_client: int,
    generator: np.random.Generator,
    *,
    low: float = 0.4,
    high: float = 0.6,
    compat: bool = False,
) -> SharePlan:
    """Draw each client's classes and its share of each, with sizes in proportion to draws from U(low, high).

    Every class gets the same number of shares; where clients × classes per client is not a multiple of the number of
    classes, some classes drawn at random get one more. One after another, clients get the classes with the most shares
    left, so that each client has different classes and no share is left over. With `compat` a client may get a class
    twice, and only multiples are accepted.
    """
    wanted = clients * classes_per_client
    each, extra = divmod(wanted, len(present))
    remaining = np.full(len(present), each, dtype=np.int64)
    if compat and extra:
        raise InputError(
            f"compat needs clients × classes per client to be a multiple of the classes, but {clients} × "
            f"{classes_per_client} is not a multiple of {len(present)}: change one of them or leave compat out."
        )
    remaining[generator.permutation(len(present))[:extra]] += 1
    weights = [generator.uniform(low, high, size=count) for count in remaining]
    choose = _choose_with_repeats if compat else _choose_distinct
    chosen = choose(remaining, clients, classes_per_client, generator)
    takers = np.repeat(np.arange(clients), classes_per_client)
    owners, shares = {}, {}
    for position in np.flatnonzero(remaining):
        label, drawn = int(present[position]), weights[position]
        owners[label] = takers[chosen.reshape(-1) == position]
        shares[label] = drawn[::-1] / drawn.sum()  # from the end, like the released code's stack of shares
    return SharePlan(owners, shares)


def share_owners(
    labels: Integers, pool: Integers, plan: SharePlan, generator: np.random.Generator, *, round_down: bool = False
) -> Integers:
    """Apply a plan to the samples of a pool: each class is shuffled and cut into its owners' shares.

    Each owner gets at least one sample where the pool has enough of the class. With `round_down` the sizes are the
    released code's: a few samples per class stay unused.
    """
    owners = np.full(len(labels), NOBODY, dtype=np.int64)
    for label, takers in plan.owners.items():
        samples = generator.permutation(pool[labels[pool] == label])
        shares = plan.shares[label]
        if round_down:
            sizes = np.floor(shares * len(samples)).astype(np.int64)
        else:
            sure = 1 if len(samples) >= len(takers) else 0
            sizes = sure + apportion(len(samples) - sure * len(takers), shares)
        owners[samples[: sizes.sum()]] = np.repeat(takers, sizes)
    return owners


def pathological_owners(
    labels: Integers,
    present: Integers,
    clients: int,
    classes_per_client: int,
    least: int,
    generator: np.random.Generator,
) -> Integers:
    """PFLlib's pathological partition: class after class goes to the first clients that still need one.

    So groups of clients own the same classes, and only the sizes are drawn: all but the last of a group get between a
    tenth and all of an even share, and the last gets the rest. Classes that are left over stay unused; where the
    numbers do not fit, the last clients own fewer classes.
    """
    owners = np.full(len(labels), NOBODY, dtype=np.int64)
    quota = np.full(clients, classes_per_client)
    group_size = -(-clients * classes_per_client // len(present))  # rounded up
    for label in present:
        group = np.flatnonzero(quota)[:group_size]
        if len(group) == 0:
            break
        samples = np.flatnonzero(labels == label)
        even = len(samples) // len(group)
        if even == 0:
            raise too_few_samples(int(label), len(samples), len(group))
        lowest = max(len(samples) // (10 * len(group)), least // len(present))
        sizes = generator.integers(max(1, min(lowest, even - 1)), max(2, even), size=len(group) - 1)
        cuts = np.cumsum(sizes)
        owners[samples] = group[np.searchsorted(cuts, np.arange(len(samples)), side="right")]
        quota[group] -= 1
    return owners


def dirichlet_owners(
    labels: Integers, classes: int, clients: int, alpha: float, least: int, generator: np.random.Generator
) -> Integers:
    """PFLlib's practical partition: each class is spread over the clients by a draw from a Dirichlet distribution.

    A client that already holds an even share of all samples gets nothing more. Draws are repeated until every client
    owns at least `least` samples, a bounded number of times.
    """
    counts = np.bincount(labels, minlength=classes)
    # Fewer attempts where one takes long, so that an impossible setting is refused within seconds.
    attempts = int(np.clip(100_000_000 // (clients * classes), 50, 1000))
    for _ in range(attempts):
        sizes = _dirichlet_sizes(counts, clients, alpha, generator)
        if sizes.sum(axis=0).min() >= least:
            break
    else:
        raise InputError(
            f"no Dirichlet draw with alpha {alpha} gave each of {clients} clients at least {least} samples in "
            f"{attempts} attempts: raise alpha, lower min_samples (now {least}) or use fewer clients."
        )
    owners = np.empty(len(labels), dtype=np.int64)
    for label in range(classes):
        owners[generator.permutation(np.flatnonzero(labels == label))] = np.repeat(np.arange(clients), sizes[label])
    return owners


def iid_owners(samples: int, clients: int, generator: np.random.Generator) -> Integers:
    """Shuffled and cut evenly: sizes differ by at most one."""
    owners = np.empty(samples, dtype=np.int64)
    owners[generator.permutation(samples)] = np.arange(samples) * clients // samples
    return owners


def apportion(total: int, shares: NDArray[np.float64]) -> Integers:
    """Cut a total into whole numbers in proportion to shares; they sum to the total, and a share of 0 gets 0.

    >>> apportion(10, np.array([1.0, 0.0, 3.0])).tolist()
    [3, 0, 7]
    """
    cumulated = np.cumsum(shares)
    cuts: Integers = np.floor(cumulated / cumulated[-1] * total + 0.5).astype(np.int64)
    return np.diff(cuts, prepend=0)


def too_few_samples(label: int, samples: int, owners: int) -> InputError:
    """The error for a class that cannot give each of its owners a sample."""
    return InputError(
        f"class {label} has {counted(samples, 'sample')} for {owners} clients that should own some: use fewer "
        f"clients or fewer classes per client."
    )


def _choose_distinct(
    remaining: Integers, clients: int, classes_per_client: int, generator: np.random.Generator
) -> Integers:
    """Each client's classes: those with the most shares left, ties drawn at random, none twice.

    Taking the largest first never runs into a dead end: no class can have more shares left than there are clients left.
    """
    remaining = remaining.copy()
    chosen = np.empty((clients, classes_per_client), dtype=np.int64)
    for client in range(clients):
        # A draw below one only decides between equal numbers of shares.
        keys = remaining + generator.random(len(remaining))
        chosen[client] = np.argpartition(-keys, classes_per_client - 1)[:classes_per_client]
        remaining[chosen[client]] -= 1
    return chosen


def _choose_with_repeats(
    remaining: Integers, clients: int, classes_per_client: int, generator: np.random.Generator
) -> Integers:
    """The released code's choice: one class after another from those with the most shares left, perhaps one twice."""
    remaining = remaining.copy()
    chosen = np.empty(clients * classes_per_client, dtype=np.int64)
    for turn in range(len(chosen)):
        candidates = np.flatnonzero(remaining == remaining.max())
        chosen[turn] = candidates[generator.integers(len(candidates))]
        remaining[chosen[turn]] -= 1
    return chosen.reshape(clients, classes_per_client)


def _dirichlet_sizes(counts: Integers, clients: int, alpha: float, generator: np.random.Generator) -> Integers:
    """Samples per class and client for one draw."""
    # Logarithms of Gamma(alpha) draws, as Gamma(alpha + 1) · U^(1/alpha): small alphas would underflow to all zeros.
    shape = (len(counts), clients)
    with np.errstate(over="ignore"):
        logarithms = np.log(generator.standard_gamma(alpha + 1, shape)) + np.log1p(-generator.random(shape)) / alpha
    logarithms = np.clip(logarithms, -1e307, 1e307)
    held, total = np.zeros(clients, dtype=np.int64), int(counts.sum())
    sizes = np.zeros(shape, dtype=np.int64)
    for label in np.flatnonzero(counts):
        # While samples are left, some client holds less than an even share, so the weights never sum to zero.
        open_logarithms = np.where(held * clients < total, logarithms[label], -np.inf)
        sizes[label] = apportion(int(counts[label]), np.exp(open_logarithms - open_logarithms.max()))
        held += sizes[label]
    return sizes
