"""What the ray engine decides without a cluster: how many hosts, who is where, when to copy, which settings."""

import sys

import pytest

from polyfed.config import RaySettings, experiment
from polyfed.engines import new_engine
from polyfed.engines.ray_actors import Actor, slices
from polyfed.engines.ray_session import planned
from polyfed.errors import InputError
from tests import support

MACHINES: list[tuple[str, dict[str, int], list[tuple[int, int]], bool, tuple[int, int]]] = [
    ("all CPUs, divided", {}, [(4, 0), (4, 0)], False, (8, 1)),
    ("a host needs its CPUs on one machine: 5 and 1 hold two of 2", {"hosts": 2}, [(5, 0), (1, 0)], False, (2, 2)),
    ("CPUs of a machine without a GPU are of no use to hosts with one", {}, [(8, 4), (32, 0)], True, (4, 2)),
    ("at most eight on a machine", {}, [(64, 0)], False, (8, 8)),
    ("no more than there are clients", {}, [(64, 8), (64, 8)], True, (10, 12)),
]


@pytest.mark.parametrize(("words", "settings", "machines", "gpu", "expected"), MACHINES)
def test_hosts_fit_on_the_machines(
    words: str, settings: dict[str, int], machines: list[tuple[int, int]], gpu: bool, expected: tuple[int, int]
) -> None:
    assert planned(RaySettings(**settings), 10, machines, gpu=gpu) == expected, words


def test_hosts_that_no_machine_can_hold_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"2 hosts need 6 CPUs, but .* has 6 CPUs, of which too few are on one machine"
    ):
        planned(RaySettings(hosts=2, cpus=3), 10, [(5, 0), (1, 0)], gpu=False)


def test_copies_are_made_after_ten_rounds_unless_they_are_dear() -> None:
    """Copies that take 0.3 s may be made every 10 s (3 %); downloads of more than 256 MB are not kept."""
    actor = Actor(0, [0], None, trained=[(round, None, 1) for round in range(9)], worked=100.0)
    assert not actor.copy_is_due(0.0)
    actor.trained.append((9, None, 1))
    assert actor.copy_is_due(0.0) and actor.copy_is_due(2.9) and not actor.copy_is_due(3.1)
    actor.trained.append((10, None, 1 << 28))
    assert actor.copy_is_due(3.1)
    actor.copied({0: "copy"})
    assert (actor.copies, actor.trained, actor.worked) == ({0: "copy"}, [], 0.0)


def test_without_ray_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"needs the package ray, .*pip install 'polyfed\[ray\]'"):
        new_engine("ray", support.population("standalone"))


def test_hosts_get_neighbours_with_about_as_many_samples() -> None:
    people = support.population("standalone", clients=6, partition="dirichlet", alpha=0.3, min_samples=4)
    for hosts in range(1, 7):
        found = slices(people, hosts)
        assert len(found) == hosts and all(found)
        assert [client for own in found for client in own] == list(range(6))
    even = support.population("standalone", clients=6, partition="iid")
    assert slices(even, 3) == [[0, 1], [2, 3], [4, 5]]


def test_settings_of_the_cluster_are_checked() -> None:
    assert experiment(method="fedproto", ray={"hosts": 2, "address": "none"}).ray == RaySettings(hosts=2)
    with pytest.raises(InputError, match="ray.hosts is 0, but must be a whole number at least 1, or none"):
        experiment(method="fedproto", ray={"hosts": 0})
    with pytest.raises(InputError, match="unknown setting 'ray.host': did you mean 'hosts'?"):
        experiment(method="fedproto", ray={"host": 1})
