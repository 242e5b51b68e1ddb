"""What keys and certificates contain, as bytes and text; `keys.py` has the files.

Needs the package cryptography: import it inside functions.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from polyfed.errors import InputError

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as error:
    raise InputError(
        "keys and certificates need the package cryptography, which is not installed: `pip install 'polyfed[flower]'`."
    ) from error

AUTHORITY_DAYS = 3650
PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----")
_CLOCKS_DIFFER = timedelta(hours=1)  # a site whose clock is behind must not find a new certificate too young
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_SHA384 = hashes.SHA384()


@dataclass(frozen=True)
class Certificate:
    """What a certificate says."""

    expires: datetime
    names: tuple[str, ...]
    """The host names and IP addresses that it holds for."""
    fingerprint: str
    """SHA-256 of its bytes, as other programs print it: to compare by telephone."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """A private key on the curve that everything here uses."""
    return ec.generate_private_key(ec.SECP384R1())


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as TLS servers read it."""
    return _private_bytes(key, serialization.PrivateFormat.PKCS8)


def openssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as Flower's nodes read it."""
    return _private_bytes(key, serialization.PrivateFormat.OpenSSH)


def line(key: ec.EllipticCurvePublicKey) -> str:
    """A public key as one line of text."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key in the notation of ssh-keygen."""
    digest = hashlib.sha256(b64decode(line(key).split()[1])).digest()
    return f"SHA256:{b64encode(digest).decode().rstrip('=')}"


def new_authority(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The certificate of an authority that signs server certificates and nothing else."""
    # Two authorities must not share a name: a client that has one would find a wrong signature instead of a stranger.
    name = _name(f"polyfed authority {secrets.token_hex(4)}")
    builder = _builder(key.public_key(), name, name, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return builder.sign(key, _SHA384).public_bytes(serialization.Encoding.PEM)


def new_server_certificate(
    authority: bytes,
    authority_key: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    days: int,
) -> bytes:
    """A certificate for a server of these host names and IP addresses, signed by the authority."""
    signer = x509.load_pem_x509_certificate(authority)
    left = (signer.not_valid_after_utc - _now()).days
    if not 1 <= days <= left:
        raise InputError(
            f"--days is {days}, but must be a whole number from 1 to {left}: the authority's own certificate ends on "
            f"{signer.not_valid_after_utc:%Y-%m-%d}."
        )
    names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(map(str.lower, hosts))])
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = _builder(key, _name("polyfed server"), signer.subject, days)
    builder = builder.add_extension(names, critical=False).add_extension(issued_by, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(authority_key, _SHA384).public_bytes(serialization.Encoding.PEM)


def parse_private(content: bytes, where: str) -> PrivateKeyTypes:
    """A private key of any kind, from PEM or OpenSSH text without a passphrase; `where` is for the error."""
    if not PRIVATE_KEY.search(content):
        raise InputError(f"{where} holds no private key in PEM or OpenSSH form: name the file that ends in .key.")
    try:
        if b"BEGIN OPENSSH" in content:
            return serialization.load_ssh_private_key(content, None)
        return serialization.load_pem_private_key(content, None)
    except TypeError as error:  # the library's way to say that a passphrase is needed
        raise InputError(
            f"the private key in {where} has a passphrase, which nobody can type for a process that runs unattended: "
            "use a key without one, in a file that only its owner can read."
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"the private key in {where} is damaged: restore it from a copy, or make a new one."
        ) from error


def parse_p384(content: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """A private key on the curve P-384."""
    key = parse_private(content, where)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(f"{where} holds {_kind(key)}, but must hold an EC P-384 key: `polyfed server keys` makes one.")
    return key


def parse_line(text: str) -> ec.EllipticCurvePublicKey:
    """A public key from its line."""
    right = "the one line `ecdsa-sha2-nistp384 AAAA…` that `polyfed server keys` prints"
    if PRIVATE_KEY.search(text.encode()):
        raise InputError(
            f"a private key stands where a public key belongs ({right}): if anyone has seen it, make a new pair."
        )
    words = text.split()
    if len(text.strip().splitlines()) != 1 or len(words) < 2:
        raise InputError(f"'{_short(text)}' is not a public key: give {right}.")
    try:
        key = serialization.load_ssh_public_key(" ".join(words[:2]).encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"'{_short(text)}' is not a public key, or was cut short: give {right}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(f"the public key is of the kind {_short(words[0])}, but must be {right}.")
    return key


def parse_certificate(content: bytes, where: str) -> Certificate:
    """What a certificate says that is valid today; the first, if the file has a chain of them."""
    found = _load_certificate(content, where)
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    if _now() > end:
        raise InputError(f"the certificate in {where} expired on {end:%Y-%m-%d}: it must be renewed.")
    if _now() < begin:
        raise InputError(f"the certificate in {where} is valid from {begin:%Y-%m-%d %H:%M} UTC: check the clock.")
    return Certificate(end, _names(found), found.fingerprint(hashes.SHA256()).hex(":").upper())


def names_in(content: bytes, where: str) -> tuple[str, ...]:
    """The host names and IP addresses that a certificate holds for, valid or not."""
    return _names(_load_certificate(content, where))


def belongs(certificate: bytes, key: bytes, where: tuple[str, str]) -> bool:
    """Whether a certificate is for the public half of this private key."""
    certified = _load_certificate(certificate, where[0]).public_key()
    return _spki(certified) == _spki(parse_private(key, where[1]).public_key())


def is_authority(certificate: bytes, where: str) -> bool:
    """Whether a certificate may sign others."""
    try:
        extension = _load_certificate(certificate, where).extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return extension.value.ca


def _load_certificate(content: bytes, where: str) -> x509.Certificate:
    try:
        found = x509.load_pem_x509_certificate(content)
        found.extensions, found.public_key()  # read only when asked for, and may be damaged too
        return found
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise InputError(f"{where} holds no certificate in PEM form: name the file that ends in .crt.") from error


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = found.get_values_for_type(x509.IPAddress)
    return (*found.get_values_for_type(x509.DNSName), *map(str, addresses))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or labels[-1].isdecimal() or not all(map(_LABEL.fullmatch, labels)):
        raise InputError(
            f"--host is '{_short(host)}', but must be a host name such as fl.example.org or an IP address, without a "
            "port; names with other letters in their xn-- form."
        )
    return x509.DNSName(host)


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_now() - _CLOCKS_DIFFER).not_valid_after(_now() + timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _private_bytes(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _spki(key: object) -> bytes:
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(encoding, form))  # type: ignore[attr-defined]


def _kind(key: object) -> str:
    curve = getattr(getattr(key, "curve", None), "name", "")
    return f"a key on the curve {curve}" if curve else f"an {type(key).__name__.removesuffix('PrivateKey')} key"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 40 else flat[:37] + "…"


def _now() -> datetime:
    return datetime.now(UTC)
