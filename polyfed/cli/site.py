"""One member of a real federation, next to its own data: `polyfed site …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.addresses import trusting
from polyfed.cli.base import AsJson, Quiet, Trust, error_console, out_console, show_list, watch
from polyfed.cli.export import Format, show_exported
from polyfed.cli.lazy import PlainCommand
from polyfed.deploy import show
from polyfed.deploy.announce import announce
from polyfed.deploy.member import read_member
from polyfed.deploy.templates import site_text
from polyfed.starter import write_new

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
SiteFile = Annotated[Path, typer.Argument(metavar="[FILE]", help="the site's file")]


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="a file that does not exist yet")] = Path("site.yaml"),
    name: Annotated[str, typer.Option(metavar="TEXT", help="the member's name in the terms")] = "amber",
    federation: Annotated[str, typer.Option(metavar="PATH", help="the terms")] = "federation.yaml",
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="where the server listens")] = "fl.example.org:9443",
    data: Annotated[
        str, typer.Option(metavar="TEXT", help="npz:PATH, folder:PATH, table:PATH or package.module:function")
    ] = "folder:images",
    network: Annotated[str, typer.Option(metavar="TEXT", help="a network's name or package.module:Class")] = "cnn2",
) -> None:
    """Write a site's file to start from. With a comment for every setting."""
    values = {"name": name, "federation": federation, "server": server, "data": data, "network": network}
    usual = {"certificate": "ca.crt", "key": f"keys/{name}.key", "split": "8:1:1", "folder": "state", "share": "scores"}
    write_new(file, site_text({**values, **usual}))
    out_console.print(f"Change it to what is yours, then try it: `polyfed site check {file}`.", soft_wrap=True)


def check(file: SiteFile = Path("site.yaml"), trust: Trust = False, as_json: AsJson = False) -> None:
    """Try this site without a connection. Loads the data, trains one step, shows all that would ever be sent."""
    with trusting(trust):
        member = read_member(file, trust=trust)
        population = member.population()
        counted = show.samples(member.dataset, member.data)
        found = announce(member, population)
    warnings = show.warnings(member)
    values = {
        "terms": member.terms.plain(),
        "samples": counted,
        "warnings": warnings,
        "announcement": found.to_dict(),
    }
    tables = [show.terms_table(member.terms), show.samples_table(counted), *show.announcement_tables(found)]
    show_list(as_json, values, *tables)
    if as_json:
        return
    for words in (*show.in_words(found), *population.notes):
        out_console.print(words, soft_wrap=True)
    for warning in warnings:
        error_console.print(f"polyfed: {warning}", soft_wrap=True)


def run(file: SiteFile = Path("site.yaml"), trust: Trust = False, quiet: Quiet = False) -> None:
    """Take part: connect, and train when asked. The same command continues after a crash."""
    from polyfed.deploy.take_part import take_part  # with Flower, which takes a second to import

    def tell(line: str) -> None:
        if not quiet:
            out_console.print(line, soft_wrap=True)

    with trusting(trust):
        member = read_member(file, trust=trust)
        watch(True, lambda watcher: take_part(member, tell), lambda watcher: _stopped(file))
    out_console.print(str(member.settings.folder), soft_wrap=True)


def _stopped(file: Path) -> str:
    return f"stopped; `polyfed site run {file}` continues, also in the middle of a round."


def export(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="a new or empty folder for the model")],
    file: SiteFile = Path("site.yaml"),
    format: Format = "safetensors",
    trust: Trust = False,
) -> None:
    """Write this site's own model for use elsewhere. As it is now, or at the end of the run."""
    from polyfed.deploy.outcome import export_model

    with trusting(trust):
        show_exported(export_model(read_member(file, trust=trust), out, format), out)


app.command("init", cls=PlainCommand)(init)
app.command("check", cls=PlainCommand)(check)
app.command("run", cls=PlainCommand)(run)
app.command("export", cls=PlainCommand)(export)
