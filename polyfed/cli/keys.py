"""`polyfed server keys`: what server and sites need to know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.base import out_console
from polyfed.deploy.keys import (
    SERVER_DAYS,
    check_certificate,
    fingerprint,
    make_server_keys,
    make_site_keys,
    renew_server_certificate,
)
from polyfed.errors import InputError


def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where the files go; made if it is missing")],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="a host name or IP address by which sites reach the server; repeat for more"),
    ] = None,
    site: Annotated[str | None, typer.Option(metavar="NAME", help="make the key pair of this member instead")] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="replace server.crt by one that is valid longer; keeps it as server.crt.old")
    ] = False,
    days: Annotated[int | None, typer.Option(help=f"how long server.crt is valid; default {SERVER_DAYS}")] = None,
) -> None:
    """Make certificates and key pairs. For the server with --host, for a site with --site; nothing is overwritten."""
    if site is not None:
        if host or renew or days is not None:
            raise InputError(
                "--site makes a key pair, which has no host and never expires: leave the other options out."
            )
        _say(_site_words(folder, site, make_site_keys(folder, site)))
    elif renew:
        renew_server_certificate(folder, host or (), _days(days))
        _say(_renewed_words(folder))
    elif host:
        make_server_keys(folder, host, _days(days))
        _say(_server_words(folder))
    else:
        raise InputError("name the server's host (--host fl.example.org) or a member (--site amber).")


def _days(days: int | None) -> int:
    return SERVER_DAYS if days is None else days


def _say(lines: list[str]) -> None:
    for line in lines:
        out_console.print(line, soft_wrap=True)


def _renewed_words(folder: Path) -> list[str]:
    return [
        _validity(folder),
        "Restart the server to use it; sites need nothing new. The one before it is server.crt.old.",
    ]


def _validity(folder: Path) -> str:
    server = check_certificate(folder / "server.crt")
    return f"The server's certificate is for {', '.join(server.names)} and valid until {server.expires:%Y-%m-%d}."


def _server_words(folder: Path) -> list[str]:
    return [
        _validity(folder),
        "",
        f"  {folder / 'ca.crt'}      give it to every member: their sites recognise the server by it",
        f"  {folder / 'server.crt'}  the server shows it to whoever connects",
        f"  {folder / 'server.key'}  private: stays on the server",
        f"  {folder / 'ca.key'}      private: needed only to renew; keep it elsewhere, with a backup",
        "",
        "Whoever has ca.key can pose as the server. Members compare the fingerprint of ca.crt with you by telephone:",
        f"  {check_certificate(folder / 'ca.crt').fingerprint}",
    ]


def _site_words(folder: Path, name: str, line: str) -> list[str]:
    return [
        f"  {folder / f'{name}.key'}  private: stays at the site; whoever has it can take part as {name}",
        f"  {folder / f'{name}.pub'}  public: goes to whoever coordinates the federation",
        "",
        "The line for `members` in federation.yaml:",
        f"  {name}: {line}",
        "",
        f"Its fingerprint, to compare by telephone: {fingerprint(line)}",
        "Best run this at the site itself, so that its private key never travels.",
    ]
