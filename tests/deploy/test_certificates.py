"""Certificates: for whom and until when they hold, and whom TLS then believes."""

from __future__ import annotations

import hashlib
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from polyfed.errors import InputError
from tests.deploy.files import HOSTS, contents, handshake

pytest.importorskip("cryptography", reason="part of the extra polyfed[flower]")

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from polyfed.deploy import certificates, keys


@pytest.mark.parametrize("host", HOSTS)
def test_a_site_with_the_authority_believes_the_server(made: Path, host: str) -> None:
    handshake(made / "ca.crt", made, host)


@pytest.mark.parametrize("host", ["example.org", "other.fl.example.org", "10.0.0.6", "localhost"])
def test_a_server_of_another_name_is_refused(made: Path, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(made / "ca.crt", made, host)


def test_a_server_of_another_authority_is_refused(made: Path, tmp_path: Path) -> None:
    keys.make_server_keys(tmp_path / "others", HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError, match="issuer certificate"):
        handshake(tmp_path / "others" / "ca.crt", made, "fl.example.org")


def test_an_expired_certificate_is_refused_until_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_now", lambda: datetime.now(UTC) - timedelta(days=366))
        keys.make_server_keys(tmp_path, HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(tmp_path / "ca.crt", tmp_path, "10.0.0.5")
    with pytest.raises(InputError, match=r"server.crt' expired on \d{4}-\d\d-\d\d: it must be renewed"):
        keys.check_certificate(tmp_path / "server.crt")
    before = contents(tmp_path)
    renewed = keys.renew_server_certificate(tmp_path)
    assert renewed.names == HOSTS
    assert 364 <= (renewed.expires - datetime.now(UTC)).days <= 365
    after = contents(tmp_path)
    assert after.pop("server.crt.old") == before["server.crt"]
    assert {name for name in after if after[name] != before[name]} == {"server.crt"}
    handshake(tmp_path / "ca.crt", tmp_path, "10.0.0.5")


def test_a_server_certificate_signs_no_other(made: Path) -> None:
    """The path length of the authority and CA:FALSE of the server: who has server.key can make no new servers."""
    key = keys.read_private_key(made / "server.key")
    server = (made / "server.crt").read_bytes()
    new = certificates.new_key()
    forged = certificates.new_server_certificate(server, key, new.public_key(), HOSTS, 10)
    (made / "server.crt").write_bytes(forged + server)
    (made / "server.key").write_bytes(certificates.pem(new))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made / "ca.crt", made, "fl.example.org")


def test_the_authority_may_sign_servers_and_no_authorities(made: Path) -> None:
    authority = x509.load_pem_x509_certificate((made / "ca.crt").read_bytes())
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    assert (authority.not_valid_after_utc - datetime.now(UTC)).days in (3649, 3650)
    server = x509.load_pem_x509_certificate((made / "server.crt").read_bytes())
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.ExtendedKeyUsageOID.SERVER_AUTH]


def test_a_second_server_certificate_comes_from_the_same_authority(made: Path) -> None:
    for name in ("server.key", "server.crt"):
        (made / name).rename(made / f"first.{name}")
    authority = (made / "ca.crt").read_bytes()
    keys.make_server_keys(made, ["second.example.org"], days=3)
    assert (made / "ca.crt").read_bytes() == authority
    handshake(made / "ca.crt", made, "second.example.org")


@pytest.mark.parametrize("days", [0, -1, 3650, 10**9])
def test_a_server_certificate_ends_before_its_authority(tmp_path: Path, days: int) -> None:
    with pytest.raises(InputError, match=rf"--days is {days}, but must be a whole number from 1 to 3649"):
        keys.make_server_keys(tmp_path / "keys", HOSTS, days)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "host",
    ["", "fl.example.org:9443", "https://fl.example.org", "*.example.org", "a b", "10.0.0.300", "ü.de", "-a"],
)
def test_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(InputError, match=r"--host is '.*', but must be a host name such as"):
        keys.make_server_keys(tmp_path / "keys", ["good.example.org", host])
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_says_until_when_and_for_whom(made: Path) -> None:
    found = keys.check_certificate(made / "server.crt")
    assert found.names == HOSTS
    der = x509.load_pem_x509_certificate((made / "server.crt").read_bytes()).public_bytes(serialization.Encoding.DER)
    assert found.fingerprint.replace(":", "").lower() == hashlib.sha256(der).hexdigest()
    assert keys.check_certificate(made / "ca.crt").names == ()


def test_a_certificate_of_tomorrow_and_no_certificate_are_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"server.key' holds no certificate in PEM form"):
        keys.check_certificate(made / "server.key")
    now = certificates._now()
    monkeypatch.setattr(certificates, "_now", lambda: now - timedelta(minutes=50))  # clocks differ a little
    keys.check_certificate(made / "server.crt")
    monkeypatch.setattr(certificates, "_now", lambda: now - timedelta(days=1))
    with pytest.raises(InputError, match=r"is valid from .* UTC: check the clock"):
        keys.check_certificate(made / "server.crt")


def test_a_certificate_needs_its_own_key(made: Path, tmp_path: Path) -> None:
    assert keys.check_pair(made / "server.crt", made / "server.key").names == HOSTS
    with pytest.raises(InputError, match=r"ca.key' does not belong to the certificate in '.*server.crt'"):
        keys.check_pair(made / "server.crt", made / "ca.key")
    (made / "server.key").chmod(0o644)
    with pytest.raises(InputError, match="has permissions 644"):
        keys.check_pair(made / "server.crt", made / "server.key")


def test_a_server_certificate_is_no_authority(made: Path) -> None:
    for half in ("key", "crt"):
        (made / f"server.{half}").replace(made / f"ca.{half}")
    with pytest.raises(InputError, match="is not an authority's"):
        keys.make_server_keys(made, HOSTS)
