"""The server of a federation: it listens for its members and leads the run. Started again, it continues."""

from __future__ import annotations

import time
from pathlib import Path

from polyfed.assemble import find_device
from polyfed.compute import machine_name, set_precision
from polyfed.deploy.checks import host_and_port
from polyfed.deploy.keys import check_pair, read_public_key
from polyfed.deploy.terms import Terms, read_terms
from polyfed.errors import InputError, listed
from polyfed.export.rebuild import last_server
from polyfed.flower import check_installed
from polyfed.records import RunFolder
from polyfed.records.claim import resume_command
from polyfed.remote import RemoteEngine
from polyfed.remote.attendance import RECONNECTING
from polyfed.resuming import explained, record_start
from polyfed.server.federation import Federation, Watcher
from polyfed.trackers.fed import run_tracked


def serve(path: Path, watcher: Watcher, *, trust: bool = False) -> RunFolder:
    """Lead the run to its end, from where it stands; returns its folder."""
    check_installed()
    terms = read_terms(path, trust=trust)
    own = terms.server
    check_pair(own.certificate, own.key)
    folder = open_folder(terms, path)
    if folder.finished and not untold(folder, terms):
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
        fleet = Fleet(members, own.certificate, own.key, place)
        fleet.start()
        try:
            engine = RemoteEngine(terms.agreement(), fleet.transport, method)
            federation = Federation(config, method, engine, folder, watcher, device=device)
            patience = 0.0
            if folder.finished:
                federation.server = last_server(method, folder, config.seed, config.rounds)
                patience = RECONNECTING
            else:
                _continue(federation, machine_name(device))
            say_farewell(federation, engine, terms, patience)
            return folder
        finally:
            fleet.close()


def _continue(federation: Federation, machine: str) -> None:
    """Run the rounds that are left, from the last checkpoint."""
    saved, problems = federation.folder.restore()
    if saved is not None:
        federation.restore(saved)
    record_start(federation, machine)
    for problem in problems:
        federation.note(problem)
    run_tracked(federation)


def untold(folder: RunFolder, terms: Terms) -> dict[int, str]:
    """Those who took part and do not know yet that the run has ended."""
    names = list(terms.members)
    joined = [int(client) for client in folder.clients()["client"]]
    return {client: names[client] for client in joined if names[client] not in folder.told}


def say_farewell(federation: Federation, engine: RemoteEngine, terms: Terms, patience: float) -> None:
    """Tell everyone who took part that the run has ended, so that they keep their final models and stop.

    Who is connected is waited for, because it may still train; who is away, only for so many seconds.
    """
    folder, show, begin = federation.folder, federation.watcher.on_note, time.monotonic()
    failed: dict[int, str] = {}
    left = untold(folder, terms)
    while left and not federation.stop_requested:
        engine.admit(show, terms.config.rounds)
        ready = [client for client in engine.available() if client in left and client not in failed]
        if ready:
            answers = engine.finish(terms.config.rounds, {client: federation.download(client) for client in ready})
            folder.keep_told([*folder.told, *(left[client] for client, failure in answers.items() if not failure)])
            failed |= {client: failure for client, failure in answers.items() if failure}
        left = untold(folder, terms)
        present = {client for client in left if left[client] in engine.transport.present()} - failed.keys()
        waited = time.monotonic() - begin
        if waited > (terms.server.reply_timeout if present else patience):
            break
        engine.transport.wait(0.1)
    for client, failure in failed.items():
        show(f"{left[client]} could not keep its final model: {failure}")
    if left:
        show(
            f"{listed(list(left.values()))} {'does' if len(left) == 1 else 'do'} not know yet that the run has ended: "
            f"`{resume_command(folder.path)}` tells those who are back"
        )


def open_folder(terms: Terms, source: Path) -> RunFolder:
    """The run's folder, new or with the same terms."""
    path, facts = terms.server.folder, {"the federation": f"'{terms.name}'"}
    if not (path / "config.yaml").exists():
        command = f"polyfed server run {source.resolve()}"
        return RunFolder.create(path, terms.experiment(), facts, command)
    folder = RunFolder.open(path)
    try:
        folder.check_settings(terms.experiment())
        folder.check_facts(facts)
    except InputError as error:
        raise InputError(f"{str(error).removesuffix('.')}, with another name and folder (server.folder).") from error
    return folder
