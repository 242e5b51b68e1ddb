"""A simulated clock: how long rounds would last on given devices, and who is too late for a deadline."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.devices import LAPTOP, PHONE, SERVER, Clock, Device, new_devices, read_devices
from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.errors import InputError, RunError
from polyfed.remote import Agreement, InMemoryTransport, RemoteEngine
from polyfed.server.federation import Federation, Interrupted, Watcher
from tests import support
from tests.stopping import StopAfterTwo, records

OWN: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
HEADER = "client,flops_per_second,upload_bytes_per_second,download_bytes_per_second,latency_seconds\n"


def table(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.write_text(header + "".join(f"{row}\n" for row in rows))
    return path


def test_seconds_by_hand() -> None:
    """6e9 operations at 2e9 per second take 3 s, 4 MB up at 1 MB/s 4 s, 10 MB down at 5 MB/s 2 s, latency 0.5 s."""
    device = Device(2e9, 1e6, 5e6, 0.5)
    assert device.seconds(flops=6e9, upload_bytes=4e6, download_bytes=10e6) == 9.5
    assert device.seconds(0, 0, 0) == 0.5


def test_a_round_lasts_as_long_as_its_slowest_or_until_the_deadline() -> None:
    needed = {3: 2.0, 5: 7.0, 8: 5.0}
    assert Clock({}).round_seconds(needed.values()) == 7.0
    assert Clock({}).late(needed) == []
    assert Clock({}, deadline=5.0).late(needed) == [5]  # who answers just then is not too late
    assert Clock({}, deadline=5.0).round_seconds(needed.values()) == 5.0
    assert Clock({}, deadline=9.0).round_seconds(needed.values()) == 7.0
    assert Clock({}, deadline=9.0).round_seconds([]) == 0.0


def test_mixes_of_devices() -> None:
    """Of ten clients five have phones, three laptops, two servers; who has which follows from the seed."""
    assert new_devices("uniform", 3, seed=0) == {0: LAPTOP, 1: LAPTOP, 2: LAPTOP}
    found = new_devices("three-tier", 10, seed=0)
    assert list(found) == list(range(10))
    assert Counter(found.values()) == {PHONE: 5, LAPTOP: 3, SERVER: 2}
    assert found == new_devices("three-tier", 10, seed=0) != new_devices("three-tier", 10, seed=1)
    assert new_devices("three-tier", 1, seed=0) == {0: PHONE}


def test_devices_from_a_table(tmp_path: Path) -> None:
    path = table(tmp_path / "devices.csv", "1, 3e9, 5, 7, 0", "0, 2e9, 4, 6, 0.25")
    assert read_devices(path, 2) == {0: Device(2e9, 4.0, 6.0, 0.25), 1: Device(3e9, 5.0, 7.0, 0.0)}


ROW = "0,1,1,1,0"


@pytest.mark.parametrize(
    ("header", "rows", "words"),
    [
        (HEADER, [ROW], "has no device for client 1: it needs a row for each of the 2 clients, from 0"),
        (HEADER, [ROW, ROW], "has client 0 twice, the second time in line 3: keep one"),
        (HEADER, [ROW, "2,1,1,1,0"], "has '2' as a client in line 3, but must have a number from 0 to 1"),
        (HEADER, [ROW, "one,1,1,1,0"], "has 'one' as a client in line 3"),
        (HEADER, [ROW, "-1,1,1,1,0"], "has '-1' as a client in line 3"),
        (HEADER, ["0,0,1,1,0"], "flops_per_second of client 0 is '0' in .*, but must be a number greater than 0"),
        (HEADER, ["0,1,-3,1,0"], "upload_bytes_per_second of client 0 is '-3' in .* a number greater than 0"),
        (HEADER, ["0,1,1,fast,0"], "download_bytes_per_second of client 0 is 'fast' in"),
        (HEADER, ["0,1,1,nan,0"], "download_bytes_per_second of client 0 is 'nan' in"),
        (HEADER, ["0,inf,1,1,0"], "flops_per_second of client 0 is 'inf' in"),
        (HEADER, ["0,1,1,1,-0.1"], "latency_seconds of client 0 is '-0.1' in .*, but must be a number at least 0"),
        (HEADER, ["0,1,1,1"], "latency_seconds of client 0 is '' in"),
        (HEADER, ["0,1,1,1,0,9"], "must have a row per client and exactly the columns client, flops_per_second"),
        (HEADER, [ROW, "1,1,1,1,0,9"], "must have a row per client and exactly the columns client, flops_per_second"),
        (HEADER, ["1" * 5000 + ",1,1,1,0"], "as a client in line 2, but must have a number from 0 to 1"),
        ("client," + HEADER, ["7,0,1,1,1,0", "7,1,1,1,1,0"], "exactly the columns client, flops_per_second"),
        (HEADER, [], "must have a row per client and exactly the columns client"),
        ("client,speed\n", ["0,1"], "exactly the columns client, flops_per_second, upload_bytes_per_second"),
    ],
)
def test_a_bad_table_is_refused_in_one_sentence(tmp_path: Path, header: str, rows: list[str], words: str) -> None:
    path = table(tmp_path / "devices.csv", *rows, header=header)
    with pytest.raises(InputError, match=words) as refused:
        polyfed.run("standalone", **{**support.DEFAULTS, "clients": 2}, **OWN, devices=str(path))
    assert str(refused.value).count("\n") == 0


def test_other_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="devices is 'three-teir', but must be none, uniform, three-tier or the path"):
        polyfed.run("standalone", **support.DEFAULTS, **OWN, devices="three-teir", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()  # before the run begins
    with pytest.raises(InputError, match="deadline is 5, but without devices no time is simulated: add devices"):
        polyfed.experiment(method="standalone", deadline=5)
    with pytest.raises(InputError, match="deadline is 0, but must be a number greater than 0, or none"):
        polyfed.experiment(method="standalone", devices="uniform", deadline=0)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="can't read the devices in '.*bytes.csv'"):
        read_devices(tmp_path / "bytes.csv", 1)


def rounds_of(federation: Federation) -> list[dict[str, Any]]:
    return [event for event in federation.folder.events() if event["event"] == "round"]


@pytest.mark.parametrize("engine", [SequentialEngine, ThreadsEngine, VectorizedEngine])
def test_a_run_on_equal_devices_by_its_own_costs(tmp_path: Path, engine: Any) -> None:
    """Both clients have one architecture and as many samples, so each has half of a round's costs.

    On a device that does 1000 operations per second, sends 10 bytes and receives 20 in a second, with a latency of
    half a second, a round takes flops/2/1000 + up/2/10 + down/2/20 + 0.5 seconds.
    """
    path = table(tmp_path / "devices.csv", *(f"{client},1000,10,20,0.5" for client in range(2)))
    federation = support.federation(
        tmp_path, "lg-fedavg", engine=engine, clients=2, models=(support.Wide,), rounds=3, eval_every=2, devices=path
    )
    summary = federation.run()
    rounds = rounds_of(federation)
    expected = [e["flops"] / 2e3 + e["upload_bytes"] / 20 + e["download_bytes"] / 40 + 0.5 for e in rounds]
    assert [event["simulated_seconds"] for event in rounds] == pytest.approx(expected)
    evaluations = federation.folder.evaluations().query("part == 'test'")
    assert evaluations.simulated_seconds.tolist() == pytest.approx([sum(expected[:2]), sum(expected)])
    assert summary["simulated_seconds"] == pytest.approx(sum(expected))
    assert "simulated_seconds" not in federation.folder.rounds()
    federation.engine.close()


def test_without_devices_there_is_no_simulated_time(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "standalone")
    assert "simulated_seconds" not in federation.run()
    assert federation.folder.evaluations().simulated_seconds.isna().all()
    assert all("simulated_seconds" not in event for event in rounds_of(federation))


def test_the_slowest_participant_counts(tmp_path: Path) -> None:
    """Latency alone: with others it would be a sum, a mean, or client 3's although it does not take part."""
    rows = (f"{client},1e30,1e30,1e30,{client + 1}" for client in range(4))
    path = table(tmp_path / "devices.csv", *rows)
    federation = support.federation(tmp_path, "lg-fedavg", participation=0.5, rounds=6, devices=path)
    federation.run()
    slowest = [max(federation.participants(number)) + 1 for number in range(1, 7)]
    assert len(set(slowest)) > 1
    assert [event["simulated_seconds"] for event in rounds_of(federation)] == pytest.approx(slowest)


def deadlined(folder: Path, **settings: Any) -> Federation:
    """Client c needs c + 1 seconds; after 2.5 s clients 2 and 3 are too late."""
    folder.mkdir(exist_ok=True)
    path = table(folder / "devices.csv", *(f"{client},1e30,1e30,1e30,{client + 1}" for client in range(4)))
    return support.federation(folder, "lg-fedavg", devices=path, deadline=2.5, models=(support.Wide,), **settings)


def test_late_replies_are_left_out_but_their_clients_have_learned(tmp_path: Path) -> None:
    federation = deadlined(tmp_path / "late", rounds=1)
    federation.run()
    plain = support.federation(tmp_path, "lg-fedavg", rounds=1, models=(support.Wide,))
    plain.run()
    row, usual = federation.folder.rounds().iloc[0], plain.folder.rounds().iloc[0]
    assert (row.participants, row.replies) == (4, 2)
    assert (row.upload_bytes, row.flops) == (usual.upload_bytes, usual.flops)  # sent all the same
    # Heads of clients 0 and 1 alone are fused, each by its number of samples.
    heads = [federation.engine.get_state(client)["model.head.weight"] for client in range(2)]
    sizes = [len(federation.engine.population.data[client].train) for client in range(2)]
    fused = sum(size * head for size, head in zip(sizes, heads, strict=True)) / sum(sizes)
    (shared,) = (t for name, t in federation.server.state.items() if name.endswith("head.weight"))
    assert torch.allclose(shared, fused)
    for client in range(4):  # all of them learned, the late ones too
        own, expected = (run.engine.get_state(client) for run in (federation, plain))
        assert all(torch.equal(own[name], expected[name]) for name in own)
    assert [event["simulated_seconds"] for event in rounds_of(federation)] == [2.5]


def test_a_late_client_is_noted_in_every_round_and_shown_once(tmp_path: Path) -> None:
    shown: list[str] = []

    class Listening(Watcher):
        def on_note(self, note: str) -> None:
            shown.append(note)

    federation = deadlined(tmp_path / "late", rounds=2)
    federation.watcher = Listening()
    federation.run()
    notes = [event for event in federation.folder.events() if event["event"] == "note"]
    assert [(note["round"], note["clients"]) for note in notes] == [(1, [2, 3]), (2, [2, 3])]
    assert shown == ["clients 2 and 3: left out of the round, too slow for the deadline of 2.5 s"]


def test_a_deadline_that_nobody_meets_stops_the_run(tmp_path: Path) -> None:
    path = table(tmp_path / "devices.csv", *(f"{client},1e30,1e30,1e30,9" for client in range(4)))
    federation = support.federation(tmp_path, "lg-fedavg", devices=path, deadline=2)
    with pytest.raises(RunError, match="round 1 has 0 .*replies and needs 1"):
        federation.run()


def test_a_resumed_run_has_the_same_times(tmp_path: Path) -> None:
    settings = {**support.DEFAULTS, "method": "fedproto", "rounds": 4, "devices": "three-tier", "participation": 0.5}
    whole = polyfed.run(**settings, **OWN, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **OWN, out=tmp_path / "stopped", watcher=StopAfterTwo())
    again = polyfed.resume(tmp_path / "stopped", **OWN)
    assert again.summary["simulated_seconds"] == whole.summary["simulated_seconds"] > 0
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_a_table_that_changed_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path leads to the table from any folder; another content is refused."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{client},1e6,1e6,1e6,0" for client in range(4)]
    table(tmp_path / "devices.csv", *rows)
    settings = {**support.DEFAULTS, "method": "standalone", "rounds": 3, "devices": "devices.csv"}
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **OWN, out=tmp_path / "run", watcher=StopAfterTwo())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    table(tmp_path / "devices.csv", *rows[:3], "3,2e6,1e6,1e6,0")
    with pytest.raises(InputError, match="the table of devices is one with hash .*, but the run in .* started with"):
        polyfed.resume(tmp_path / "run", **OWN)
    table(tmp_path / "devices.csv", *rows)
    assert polyfed.resume(tmp_path / "run", **OWN).summary["simulated_seconds"] > 0


def test_clients_elsewhere_have_no_simulated_clock(tmp_path: Path) -> None:
    config = polyfed.experiment(method="standalone", devices="uniform", clients=1)
    people = support.population("standalone", clients=1)
    engine = RemoteEngine(Agreement("run", {}, 4, (1, 6, 6), {"amber": 0}), InMemoryTransport({}), people.method)
    folder = polyfed.RunFolder.create(tmp_path / "run", config)
    with pytest.raises(InputError, match="devices is uniform, but only a simulation has a simulated clock"):
        Federation(config, people.method, engine, folder)


def test_a_run_keeps_these_settings(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "standalone", devices="three-tier", deadline=60)
    text = federation.config.to_yaml()
    assert "devices: three-tier" in text and "deadline: 60.0" in text
    assert json.loads((federation.folder.path / "run.json").read_text())["settings"]["deadline"] == 60.0
