"""Files by which server and sites know each other: an authority, a server certificate, a site's key pair.

Private files are readable only by their owner from the first byte, and nothing is ever overwritten: of two processes
that make the same file one is refused. If something fails, what this call has made is removed.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from polyfed.errors import FolderError, InputError
from polyfed.records import disk
from polyfed.records.claim import locked

if TYPE_CHECKING:  # cryptography is part of an extra
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    from polyfed.deploy.certificates import Certificate

SERVER_DAYS = 365
_PRIVATE, _PUBLIC = 0o600, 0o666
_AUTHORITY, _SERVER = "ca", "server"
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_Write: TypeAlias = Callable[[str, bytes, int], None]


def make_server_keys(folder: Path, hosts: Sequence[str], days: int = SERVER_DAYS) -> Certificate:
    """Make server.key and server.crt for these hosts, and before them ca.key and ca.crt unless they are there."""
    from polyfed.deploy import certificates

    if not hosts:
        raise InputError("a server certificate needs the name or address by which sites reach the server: --host.")
    with _making(folder) as write:
        if _has_authority(folder):
            authority_key, authority = _read_authority(folder)
        else:
            authority_key = certificates.new_key()
            authority = certificates.new_authority(authority_key)
            write("ca.key", certificates.pem(authority_key), _PRIVATE)
            write("ca.crt", authority, _PUBLIC)
        key = certificates.new_key()
        content = certificates.new_server_certificate(authority, authority_key, key.public_key(), hosts, days)
        write("server.key", certificates.pem(key), _PRIVATE)
        write("server.crt", content, _PUBLIC)
    return check_certificate(folder / "server.crt")


def renew_server_certificate(folder: Path, hosts: Sequence[str] = (), days: int = SERVER_DAYS) -> Certificate:
    """Replace server.crt by one that holds longer, for the same key; the old one stays as server.crt.old.

    Without hosts, it is for those of the old one, which may have expired. Sites need nothing new.
    """
    from polyfed.deploy import certificates

    path = folder / "server.crt"
    old = _read(path)
    authority_key, authority = _read_authority(folder)
    key = read_private_key(folder / "server.key")
    names = hosts or certificates.names_in(old, f"'{path}'")
    content = certificates.new_server_certificate(authority, authority_key, key.public_key(), names, days)
    with _said(folder), locked(folder):
        disk.write(path.with_name("server.crt.old"), old)
        disk.write(path, content)
    return check_certificate(path)


def make_site_keys(folder: Path, name: str) -> str:
    """Make NAME.key and NAME.pub; returns the public key as the line for federation.yaml."""
    from polyfed.deploy import certificates

    if not _SITE.fullmatch(name) or name in (_AUTHORITY, _SERVER):
        raise InputError(
            f"--site is '{name[:80]}', but must be a name of letters, digits, '.', '-' and '_' that begins with a "
            f"letter or digit and is neither '{_AUTHORITY}' nor '{_SERVER}'."
        )
    key = certificates.new_key()
    line = certificates.line(key.public_key())
    with _making(folder) as write:
        write(f"{name}.key", certificates.openssh(key), _PRIVATE)
        write(f"{name}.pub", f"{line} {name}\n".encode(), _PUBLIC)
    return line


def read_private_key(path: Path) -> EllipticCurvePrivateKey:
    """A site's or server's private key: EC P-384, in PEM or OpenSSH form, readable only by its owner."""
    from polyfed.deploy import certificates

    return certificates.parse_p384(_read(path, private=True), f"'{path}'")


def read_public_key(line: str) -> EllipticCurvePublicKey:
    """A member's public key from its line in federation.yaml."""
    from polyfed.deploy import certificates

    return certificates.parse_line(line)


def public_line(key: EllipticCurvePrivateKey | EllipticCurvePublicKey) -> str:
    """A key's public half as one line, without a comment: equal keys have equal lines."""
    from polyfed.deploy import certificates

    return certificates.line(key.public_key() if hasattr(key, "public_key") else key)


def fingerprint(line: str) -> str:
    """A short form of a public key, to compare by telephone."""
    from polyfed.deploy import certificates

    return certificates.key_fingerprint(certificates.parse_line(line))


def check_certificate(path: Path) -> Certificate:
    """Until when a certificate is valid, for which hosts, and its fingerprint; one that is not valid now is refused."""
    from polyfed.deploy import certificates

    return certificates.parse_certificate(_read(path), f"'{path}'")


def check_pair(certificate: Path, key: Path) -> Certificate:
    """As `check_certificate`, and the private key must be the one that the certificate is for. Of any kind."""
    from polyfed.deploy import certificates

    where = f"'{certificate}'", f"'{key}'"
    if not certificates.belongs(_read(certificate), _read(key, private=True), where):
        raise InputError(f"the private key in '{key}' does not belong to the certificate in '{certificate}'.")
    return check_certificate(certificate)


def _has_authority(folder: Path) -> bool:
    paths = {folder / "ca.key", folder / "ca.crt"}
    there = {path for path in paths if path.exists()}
    if len(there) == 1:
        (found,), (missing,) = there, paths - there
        raise InputError(f"'{found}' is there, but '{missing}' is not: put it back, or choose another folder.")
    return bool(there)


def _read_authority(folder: Path) -> tuple[EllipticCurvePrivateKey, bytes]:
    from polyfed.deploy import certificates

    path = folder / "ca.crt"
    key, content = read_private_key(folder / "ca.key"), _read(path)
    check_pair(path, folder / "ca.key")
    if not certificates.is_authority(content, f"'{path}'"):
        raise InputError(f"the certificate in '{path}' is not an authority's and can't sign others.")
    return key, content


def _read(path: Path, *, private: bool = False) -> bytes:
    """The content of a file; a private one that others can read is refused."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode  # of what is read, whatever the name may point to by now
            if private and sys.platform != "win32" and stat.S_IMODE(mode) & 0o077:
                raise InputError(
                    f"the private key '{path}' has permissions {stat.S_IMODE(mode):o}, so others can use it: "
                    f"`chmod 600 {path}`, and make a new one if anyone may have read it."
                )
            return file.read()
    except OSError as error:
        raise InputError(f"can't read '{path}': {error.strerror or error}.") from error


@contextmanager
def _making(folder: Path) -> Iterator[_Write]:
    """Gives a function that writes a new file into the folder; if anything fails, all of them are removed again."""
    made: list[Path] = []

    def write(name: str, content: bytes, mode: int) -> None:
        path = folder / name
        try:
            disk.write_first(path, content, mode=mode)
        except FileExistsError as error:
            raise FolderError(
                f"'{path}' is there already, and keys are never overwritten: choose another folder or name, or move it "
                f"away{', or renew the certificate with --renew' if name.startswith(_SERVER) else ''}."
            ) from error
        made.append(path)
        if mode == _PRIVATE:
            _read(path, private=True)  # some file systems ignore permissions

    new = not folder.exists()
    with _said(folder):
        _make_folder(folder)
        with locked(folder):  # or another process might use an authority that is about to be removed
            try:
                yield write
            except BaseException:
                for path in made:
                    disk.remove(path)
                if new:
                    disk.remove_folder(folder)
                raise


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        disk.make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        disk.sync_folder(folder.parent)


@contextmanager
def _said(folder: Path) -> Iterator[None]:
    """Inside, what can't be written is one sentence."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"can't write to '{folder}': {error.strerror or error}.") from error
