"""What a site has in the end: its own model, in the form that `polyfed predict` and `polyfed export` know."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from polyfed.deploy.member import Member
from polyfed.errors import InputError
from polyfed.export.card import ModelCard, run_card
from polyfed.export.load import CARD
from polyfed.export.rebuild import filled
from polyfed.export.write import check_free, random_samples, samples_of, write_model
from polyfed.message import State, state_bytes
from polyfed.population import Population
from polyfed.records import disk

FINAL = "final.safetensors"
"""The state at the end of the run, with what the server knew then."""


def has_model(folder: Path) -> bool:
    """Whether a site's folder holds its model, all of it."""
    return disk.read(folder / "model" / CARD) is not None


def keep_final(member: Member, population: Population, state: State) -> None:
    """Keep the state of the run's end, and the model for use."""
    folder = member.settings.folder
    disk.write(folder / FINAL, state_bytes(state))
    if not has_model(folder):
        _write(member, population, state, folder / "model", "safetensors")


def export_model(member: Member, out: Path, format: str = "safetensors") -> ModelCard:
    """Write the site's model into a new or empty folder: that of the run's end, or of the last round it trained."""
    check_free(out)
    population = member.population()
    content = disk.read(member.settings.folder / FINAL)
    if content is None:
        site = member.site(population)
        try:
            state = site.newest_state()
        finally:
            site.close()
        if state is None:
            raise InputError(f"site '{member.name}' has trained no round yet, so there is no model to write.")
        return _write(member, population, state, out, format)
    try:
        return _write(member, population, load(content), out, format)
    except SafetensorError as error:
        raise InputError(f"'{member.settings.folder / FINAL}' is damaged: restore it.") from error


def _write(member: Member, population: Population, state: State, out: Path, format: str) -> ModelCard:
    own, client = member.settings, member.number
    network = own.network or member.terms.common.network or ""
    config = member.terms.experiment().model_copy(update={"models": network, "head": own.head})
    card = run_card(config, population)
    filled_network = filled(population.new_network(client).cpu(), state, f"the state of site '{member.name}'")
    test = member.data.test
    samples = (
        samples_of(member.dataset, test, client)
        if len(test)
        else random_samples(card, client, "this site has no test samples")
    )
    return write_model(out, card, client, population.method, filled_network, samples, (None, len(test)), format=format)
