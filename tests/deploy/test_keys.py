"""Keys: who can read them, that nothing is overwritten, in which form they are read, and whom Flower believes."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import InputError
from polyfed.records import disk
from tests.deploy.files import HOSTS, contents, handshake
from tests.shell import Shell, is_one_sentence

pytest.importorskip("cryptography", reason="part of the extra polyfed[flower]")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import ssh

from polyfed.deploy import keys


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_files_are_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys.make_server_keys(tmp_path / "a" / "keys", HOSTS)
        keys.make_site_keys(tmp_path / "a" / "keys", "amber")
    finally:
        os.umask(before)
    folder = tmp_path / "a" / "keys"
    assert mode(folder) == 0o700
    private = {"ca.key", "server.key", "amber.key"}
    assert {path.name for path in folder.iterdir() if mode(path) == 0o600} == private
    assert set(contents(folder)) == private | {"ca.crt", "server.crt", "amber.pub"}


def test_private_files_are_private_from_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = os.write

    def watched(file: int, content: bytes) -> int:
        if b"PRIVATE KEY" in bytes(content):
            seen.append(stat.S_IMODE(os.fstat(file).st_mode))
        return real(file, content)

    monkeypatch.setattr(os, "write", watched)
    keys.make_server_keys(tmp_path, HOSTS)
    keys.make_site_keys(tmp_path, "amber")
    assert seen == [0o600] * 3


def test_nothing_is_overwritten(made: Path) -> None:
    keys.make_site_keys(made, "amber")
    before = contents(made)
    with pytest.raises(InputError, match=r"server.key' is there already, .* --renew"):
        keys.make_server_keys(made, HOSTS)
    with pytest.raises(InputError, match="amber.key' is there already"):
        keys.make_site_keys(made, "amber")
    assert contents(made) == before


def test_a_public_key_in_the_way_leaves_no_private_one(tmp_path: Path) -> None:
    (tmp_path / "amber.pub").write_text("mine")
    with pytest.raises(InputError, match="amber.pub' is there already"):
        keys.make_site_keys(tmp_path, "amber")
    assert contents(tmp_path) == {"amber.pub": b"mine"}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "amber.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is there already"):
        keys.make_site_keys(folder, "amber")
    assert not (tmp_path / "elsewhere").exists()


def test_half_an_authority_is_not_completed(made: Path) -> None:
    for path in (made / "ca.crt", made / "server.key", made / "server.crt"):
        path.unlink()
    with pytest.raises(InputError, match=r"ca.key' is there, but '.*ca.crt' is not"):
        keys.make_server_keys(made, HOSTS)
    assert set(contents(made)) == {"ca.key"}


@pytest.mark.parametrize("without_links", [False, True])
def test_of_many_at_once_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_links: bool) -> None:
    if without_links:
        monkeypatch.setattr(os, "link", failing(OSError(errno.EPERM, "no hard links")))

    def make(number: int) -> bool:
        try:
            keys.make_server_keys(tmp_path / "keys", HOSTS)
        except InputError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(make, range(16))) == 1
    assert set(contents(tmp_path / "keys")) == {"ca.key", "ca.crt", "server.key", "server.crt"}
    keys.check_pair(tmp_path / "keys" / "ca.crt", tmp_path / "keys" / "ca.key")
    handshake(tmp_path / "keys" / "ca.crt", tmp_path / "keys", "fl.example.org")


def test_of_many_pairs_for_one_site_one_is_made(tmp_path: Path) -> None:
    def make(number: int) -> str | None:
        try:
            return keys.make_site_keys(tmp_path, "amber")
        except InputError:
            return None

    with ThreadPoolExecutor(8) as threads:
        (line,) = [line for line in threads.map(make, range(16)) if line]
    assert keys.public_line(keys.read_private_key(tmp_path / "amber.key")) == line
    assert (tmp_path / "amber.pub").read_text() == f"{line} amber\n"


def failing(error: Exception, after: int = 0, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that works a number of times, and then raises this error."""
    left = [after]

    def call(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 or real is None:
            raise error
        return real(*arguments, **options)

    return call


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("function", "after"),
    [*(("write", n) for n in range(4)), *(("link", n) for n in range(4)), *(("fsync", n) for n in range(1, 9))],
)
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, after: int) -> None:
    folder = tmp_path / "keys"
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(FULL, after, getattr(os, function)))
        if function == "link":  # then the disk has no place for another name either
            patch.setattr(disk.Path, "replace", failing(FULL))
        with pytest.raises(InputError, match=r"^can't write to '.*keys': No space left on device\.$"):
            keys.make_server_keys(folder, HOSTS)
    assert list(tmp_path.iterdir()) == []
    assert keys.make_server_keys(folder, HOSTS).names


def test_a_full_disk_leaves_the_authority_and_the_old_certificate(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(made)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(FULL, 1, os.write))
        with pytest.raises(InputError, match="No space left"):
            keys.renew_server_certificate(made)
    after = contents(made)
    assert after.pop("server.crt.old") == before["server.crt"]
    assert after == before


def test_a_file_system_that_ignores_permissions_gets_no_private_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def careless(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        file = real(path, flags, mode, **options)
        if flags & os.O_CREAT:
            os.fchmod(file, 0o755)
        return file

    monkeypatch.setattr(os, "open", careless)
    with pytest.raises(InputError, match="has permissions 755"):
        keys.make_site_keys(tmp_path / "keys", "amber")
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("name", ["", "../amber", "a/b", ".hidden", "server", "ca", "a b", "a\n", "x" * 65])
def test_a_name_that_is_no_file_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="--site is "):
        keys.make_site_keys(tmp_path / "keys", name)
    assert list(tmp_path.iterdir()) == []


def private(path: Path, content: bytes) -> Path:
    path.touch(0o600)
    path.write_bytes(content)
    return path


def in_form(key: Any, form: str = "PKCS8", password: bytes = b"") -> bytes:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    content = key.private_bytes(serialization.Encoding.PEM, getattr(serialization.PrivateFormat, form), encryption)
    return bytes(content)


@pytest.mark.parametrize("form", ["PKCS8", "OpenSSH", "TraditionalOpenSSL"])
def test_a_private_key_is_read_in_every_usual_form(tmp_path: Path, form: str) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    found = keys.read_private_key(private(tmp_path / "amber.key", in_form(key, form)))
    assert found.private_numbers() == key.private_numbers()


@pytest.mark.parametrize("form", ["PKCS8", "OpenSSH", "TraditionalOpenSSL"])
def test_a_private_key_with_a_passphrase_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(ssh, "_bcrypt_kdf", lambda password, salt, size, *rest: bytes(size))  # a package of its own
    content = in_form(ec.generate_private_key(ec.SECP384R1()), form, b"secret")
    with pytest.raises(InputError, match="has a passphrase"):
        keys.read_private_key(private(tmp_path / "amber.key", content))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no private key"),
        (b"ecdsa-sha2-nistp384 AAAA amber", "holds no private key in PEM or OpenSSH form"),
        (b"-----BEGIN PRIVATE KEY-----\nMIG2\n-----END PRIVATE KEY-----\n", "is damaged"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nMIG2\n-----END OPENSSH PRIVATE KEY-----\n", "is damaged"),
        (in_form(ec.generate_private_key(ec.SECP256R1())), "a key on the curve secp256r1, but must hold an EC P-384"),
        (in_form(ed25519.Ed25519PrivateKey.generate(), "OpenSSH"), "holds an Ed25519 key, but"),
        (in_form(rsa.generate_private_key(65537, 1024)), "holds an RSA key, but"),
    ],
    ids=lambda value: "a key" if "BEGIN" in str(value) or len(value) > 120 else str(value),
)
def test_what_is_no_private_key_for_us_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        keys.read_private_key(private(tmp_path / "amber.key", content))


@pytest.mark.parametrize("permissions", [0o640, 0o604, 0o620, 0o601, 0o644])
def test_a_private_key_that_others_can_use_is_refused(tmp_path: Path, permissions: int) -> None:
    keys.make_site_keys(tmp_path, "amber")
    (tmp_path / "amber.key").chmod(permissions)
    with pytest.raises(InputError, match=rf"has permissions {permissions:o}, so others can use it: `chmod 600 "):
        keys.read_private_key(tmp_path / "amber.key")


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    for read in (keys.read_private_key, keys.check_certificate):
        with pytest.raises(InputError, match=r"^can't read '.*x': No such file or directory\.$"):
            read(tmp_path / "x")
        with pytest.raises(InputError, match=r"^can't read '.*': Is a directory\.$"):
            read(tmp_path)


def test_a_public_key_is_read_with_and_without_a_comment(tmp_path: Path) -> None:
    line = keys.make_site_keys(tmp_path, "amber")
    for text in (line, f"  {line} amber@host\n", line.replace(" ", "   ")):
        assert keys.public_line(keys.read_public_key(text)) == line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a public key: give the one line"),
        ("ecdsa-sha2-nistp384", "is not a public key"),
        ("ecdsa-sha2-nistp384 AAAA", "or was cut short"),
        ("ssh-dss AAAA", "is not a public key"),
        (in_form(ec.generate_private_key(ec.SECP384R1())).decode(), "a private key stands where a public key belongs"),
        (keys.public_line(ec.generate_private_key(ec.SECP256R1())), "of the kind ecdsa-sha2-nistp256"),
    ],
    ids=lambda value: "a key" if "BEGIN" in str(value) or len(value) > 120 else str(value),
)
def test_what_is_no_public_key_for_us_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        keys.read_public_key(text)
    assert "\n" not in str(caught.value) and "MIG2" not in str(caught.value)


def test_every_cut_of_a_public_key_is_refused(tmp_path: Path) -> None:
    line = keys.make_site_keys(tmp_path, "amber")
    for length in range(len(line) - 4):
        with pytest.raises(InputError):
            keys.read_public_key(line[:length])


def test_flower_reads_a_sites_keys_and_believes_its_signature(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="part of the extra polyfed[flower]")
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes, verify_signature
    from flwr.supercore.primitives.asymmetric import sign_message as sign
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    line = keys.make_site_keys(tmp_path, "amber")
    keys.make_site_keys(tmp_path, "birch")
    arguments = Namespace(auth_supernode_private_key=str(tmp_path / "amber.key"), auth_supernode_public_key=None)
    found = _try_setup_client_authentication(arguments)
    assert found is not None
    registered = {name: try_load_public_key(tmp_path / f"{name}.pub") for name in ("amber", "birch")}
    assert public_key_to_bytes(keys.read_public_key(line)) == registered["amber"]
    for key in (found[0], keys.read_private_key(tmp_path / "amber.key")):
        signature = sign(key, b"2026-01-01T00:00:00+00:00")
        amber, birch = (bytes_to_public_key(registered[name]) for name in ("amber", "birch"))
        assert verify_signature(amber, b"2026-01-01T00:00:00+00:00", signature)
        assert not verify_signature(amber, b"2026-01-01T00:00:01+00:00", signature)
        assert not verify_signature(birch, b"2026-01-01T00:00:00+00:00", signature)


def test_the_command_says_what_goes_where(shell: Shell, tmp_path: Path) -> None:
    status, output, error = shell("server", "keys", "keys", "--host", "fl.example.org", "--host", "10.0.0.5")
    assert (status, error) == (0, "")
    assert "for fl.example.org, 10.0.0.5 and valid until" in output
    assert "keys/ca.crt      give it to every member" in output
    assert keys.check_certificate(tmp_path / "keys" / "ca.crt").fingerprint in output
    status, output, error = shell("server", "keys", "keys", "--site", "amber")
    line = (tmp_path / "keys" / "amber.pub").read_text().rsplit(" ", 1)[0]
    assert (status, error) == (0, "")
    assert f"\n  amber: {line}\n" in output
    assert keys.fingerprint(line) in output
    status, output, error = shell("server", "keys", "keys", "--renew", "--days", "7")
    assert (status, error) == (0, "")
    assert "Restart the server to use it" in output
    assert "PRIVATE" not in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), r"name the server's host \(--host fl.example.org\) or a member \(--site amber\)"),
        (("--site", "amber", "--host", "a.org"), "leave the other options out"),
        (("--site", "amber", "--days", "3"), "leave the other options out"),
        (("--renew",), "can't read 'keys/server.crt': No such file"),
        (("--host", "a.org", "--days", "9999"), "--days is 9999"),
    ],
)
def test_the_command_refuses_in_one_sentence(shell: Shell, arguments: tuple[str, ...], words: str) -> None:
    ended = shell("server", "keys", "keys", *arguments)
    assert ended.status == 2 and is_one_sentence(ended.error)
    assert re.search(words, ended.error)


def test_without_cryptography_the_extra_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "polyfed.deploy.certificates", raising=False)
    monkeypatch.delattr("polyfed.deploy.certificates", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    ended = shell("server", "keys", "keys", "--site", "amber")
    assert ended.status == 2 and is_one_sentence(ended.error)
    assert "pip install 'polyfed[flower]'" in ended.error
