"""The certificates of a federation: an authority of its own, and the server's certificate.

The authority's certificate is public: every site gets it in the invitation and believes the server
because of it. The authority's key stays at the server, which makes itself a new certificate each
time it starts. So a server's certificate never runs out unseen.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsieve.deploy.address import Address
from fedsieve.errors import FedsieveError, check

AUTHORITY_DAYS = 3650
SERVER_DAYS = 365
CLOCK_SLACK = datetime.timedelta(days=1)
"""Certificates begin this much before they are made, for machines whose clock is slow."""


@dataclass(frozen=True)
class Authority:
    """Who vouches for a server: a key, and the certificate that says so."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def __repr__(self) -> str:
        return f"Authority({fingerprint(self.certificate)})"


def make_authority(address: Address, now: datetime.datetime) -> Authority:
    """A new authority for the federation at `address`."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name(f"fedsieve authority of {address}")
    unsigned = _begin(name, name, key, now, AUTHORITY_DAYS)
    unsigned = unsigned.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    unsigned = unsigned.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return Authority(key, unsigned.sign(key, hashes.SHA384()))


def make_server_certificate(
    authority: Authority, addresses: Sequence[Address], now: datetime.datetime
) -> tuple[bytes, bytes]:
    """A certificate (PEM) of a server that is reached at any of `addresses`, and its key (PEM)."""
    key = ec.generate_private_key(ec.SECP384R1())
    issuer = authority.certificate
    alternatives: list[x509.GeneralName] = [
        x509.DNSName(address.host) if address.ip is None else x509.IPAddress(address.ip)
        for address in dict.fromkeys(addresses)
    ]
    unsigned = _begin(
        _name(f"fedsieve server of {addresses[0]}"), issuer.subject, key, now, SERVER_DAYS
    )
    unsigned = unsigned.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    unsigned = unsigned.add_extension(_usage(digital_signature=True), critical=True)
    unsigned = unsigned.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    unsigned = unsigned.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    unsigned = unsigned.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
        critical=False,
    )
    certificate = unsigned.sign(authority.key, hashes.SHA384())
    return certificate.public_bytes(serialization.Encoding.PEM), private_pem(key)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoded: bytes = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return encoded


def read_certificate(pem: str, where: str) -> x509.Certificate:
    """An authority's certificate from its text."""
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except (ValueError, x509.ExtensionNotFound):
        raise FedsieveError(
            f"{where} holds no certificate of an authority; ask the server for a new invitation."
        ) from None
    check(
        basic.value.ca,
        f"The certificate in {where} is not an authority's; ask the server for a new invitation.",
    )
    return certificate


def read_authority(key_pem: bytes, certificate: x509.Certificate, where: str) -> Authority:
    """The authority with this certificate; its key must fit."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != certificate.public_key()
    ):
        raise FedsieveError(
            f"{where} is not the key of this federation's authority; restore it from a backup."
        )
    return Authority(key, certificate)


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate in groups of four digits, for people to compare."""
    digits = certificate.fingerprint(hashes.SHA256()).hex()
    return " ".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def _name(text: str) -> x509.Name:
    # X.509 allows 64 characters in a common name; who is meant stands in the alternative names.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _begin(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )
