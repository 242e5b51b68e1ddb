"""The server of a federation: it listens for its members and leads the run. Started again, it continues."""

from __future__ import annotations

from pathlib import Path

from polyfed.api import explained, record_start
from polyfed.assemble import find_device
from polyfed.compute import machine_name, set_precision
from polyfed.deploy.checks import host_and_port
from polyfed.deploy.keys import check_pair, read_public_key
from polyfed.deploy.terms import Terms, read_terms
from polyfed.errors import InputError
from polyfed.flower import check_installed
from polyfed.records import RunFolder
from polyfed.remote import RemoteEngine
from polyfed.server.federation import Federation, Watcher
from polyfed.trackers.fed import run_tracked


def serve(path: Path, watcher: Watcher, *, trust: bool = False) -> RunFolder:
    """Lead the run to its end, from where it stands; returns its folder."""
    check_installed()
    terms = read_terms(path, trust=trust)
    own = terms.server
    check_pair(own.certificate, own.key)
    folder = open_folder(terms, path)
    if folder.finished:
        return folder
    place = host_and_port(own.listen)
    if place is None:
        raise InputError(f"server.listen is '{own.listen}', but must be an address and a port, such as 0.0.0.0:9443.")
    device = find_device(own.device)
    set_precision(device, tf32=own.tf32)
    from polyfed.flower.server import Fleet  # only now is it known that Flower is there

    config, method = terms.experiment(), terms.method()
    members = {name: read_public_key(line) for name, line in terms.members.items()}
    with folder.owned(), explained(folder, config):
        saved, problems = folder.restore()
        fleet = Fleet(members, own.certificate, own.key, place)
        fleet.start()
        try:
            engine = RemoteEngine(terms.agreement(), fleet.transport, method)
            federation = Federation(config, method, engine, folder, watcher, device=device)
            if saved is not None:
                federation.restore(saved)
            record_start(federation, machine_name(device))
            for problem in problems:
                federation.note(problem)
            run_tracked(federation)
            engine.finish(config.rounds, {client: federation.download(client) for client in engine.available()})
            return folder
        finally:
            fleet.close()


def open_folder(terms: Terms, source: Path) -> RunFolder:
    """The run's folder, new or with the same terms."""
    path, facts = terms.server.folder, {"the federation": f"'{terms.name}'"}
    if not (path / "config.yaml").exists():
        command = f"polyfed server run {source.resolve()}"
        return RunFolder.create(path, terms.experiment(), facts, command)
    folder = RunFolder.open(path)
    folder.check_settings(terms.experiment())
    folder.check_facts(facts)
    return folder
