"""Certificates and keys, judged by other programs than those that made them."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509 import verification

from fedsieve.deploy.address import Address, parse_address
from fedsieve.deploy.certificates import (
    fingerprint,
    make_authority,
    make_server_certificate,
    private_pem,
    read_authority,
    read_certificate,
)
from fedsieve.deploy.keys import (
    check_private,
    make_key,
    private_folder,
    public_half,
    read_public_key,
    write_private,
)
from fedsieve.errors import FedsieveError
from fedsieve.ports import free_port

NOW = datetime.datetime(2030, 5, 17, 12, 0, tzinfo=datetime.UTC)
HOME = Address("fl.example.org", 9000)
DAY = datetime.timedelta(days=1)


def pem_of(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def verify(
    authority: x509.Certificate, server: x509.Certificate, host: str, at: datetime.datetime
) -> None:
    """Accept `server` as a browser would, or raise."""
    try:
        subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    builder = verification.PolicyBuilder().store(verification.Store([authority])).time(at)
    builder.build_server_verifier(subject).verify(server, [])  # type: ignore[arg-type]


class TestCertificates:
    authority = make_authority(HOME, NOW)
    pem, key_pem = make_server_certificate(
        authority, [HOME, Address("127.0.0.1"), Address("::1")], NOW
    )
    server = x509.load_pem_x509_certificate(pem)

    @pytest.mark.parametrize("host", ["fl.example.org", "127.0.0.1", "::1"])
    def test_the_chain_holds_for_each_address(self, host: str) -> None:
        verify(self.authority.certificate, self.server, host, NOW)

    def test_it_holds_for_no_other_address(self) -> None:
        with pytest.raises(verification.VerificationError):
            verify(self.authority.certificate, self.server, "other.example.org", NOW)

    def test_another_authority_is_not_believed(self) -> None:
        with pytest.raises(verification.VerificationError):
            verify(make_authority(HOME, NOW).certificate, self.server, "127.0.0.1", NOW)

    @pytest.mark.parametrize(
        ("days", "is_valid"), [(-1.01, False), (-0.99, True), (364.9, True), (365.1, False)]
    )
    def test_the_servers_validity_begins_a_day_early_and_lasts_a_year(
        self, days: float, is_valid: bool
    ) -> None:
        at = NOW + days * DAY
        if is_valid:
            verify(self.authority.certificate, self.server, "127.0.0.1", at)
        else:
            with pytest.raises(verification.VerificationError):
                verify(self.authority.certificate, self.server, "127.0.0.1", at)

    def test_the_authority_lasts_ten_years(self) -> None:
        assert self.authority.certificate.not_valid_after_utc == NOW + 3650 * DAY

    def test_each_may_do_its_own_work_only(self) -> None:
        def extension(certificate: x509.Certificate, kind: type) -> object:
            return certificate.extensions.get_extension_for_class(kind).value  # type: ignore[type-var]

        above, below = self.authority.certificate, self.server
        assert extension(above, x509.BasicConstraints) == x509.BasicConstraints(True, 0)
        assert extension(below, x509.BasicConstraints) == x509.BasicConstraints(False, None)
        usage = extension(above, x509.KeyUsage)
        assert isinstance(usage, x509.KeyUsage)
        assert (usage.key_cert_sign, usage.digital_signature) == (True, False)
        usage = extension(below, x509.KeyUsage)
        assert isinstance(usage, x509.KeyUsage)
        assert (usage.key_cert_sign, usage.digital_signature) == (False, True)
        assert extension(below, x509.ExtendedKeyUsage) == x509.ExtendedKeyUsage(
            [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]
        )
        for certificate in (above, below):
            assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)

    def test_openssl_agrees(self, tmp_path: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs the program openssl")
        now = datetime.datetime.now(datetime.UTC)
        authority = make_authority(HOME, now)
        pem, _ = make_server_certificate(authority, [HOME], now)
        (tmp_path / "ca").write_text(pem_of(authority.certificate))
        (tmp_path / "server").write_bytes(pem)
        command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver"]
        command += ["-verify_hostname", HOME.host, "-CAfile", "ca", "server"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout == "server: OK\n", done.stderr

    def test_a_long_address_fits(self) -> None:
        host = ".".join(["a" * 60] * 4)
        authority = make_authority(Address(host), NOW)
        pem, _ = make_server_certificate(authority, [Address(host)], NOW)
        verify(authority.certificate, x509.load_pem_x509_certificate(pem), host, NOW)

    def test_an_authority_comes_back_from_its_files(self) -> None:
        certificate = read_certificate(pem_of(self.authority.certificate), "it")
        again = read_authority(private_pem(self.authority.key), certificate, "ca.key")
        assert again.key.private_numbers() == self.authority.key.private_numbers()
        assert "Authority(" in repr(again)
        assert str(again.key.private_numbers().private_value) not in repr(again)

    def test_wrong_files_are_refused(self) -> None:
        certificate = self.authority.certificate
        other_curve_family = ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        stranger = private_pem(make_authority(HOME, NOW).key)
        for pem in (b"nothing", stranger, other_curve_family):
            with pytest.raises(FedsieveError, match=r"ca\.key is not the key of this federation"):
                read_authority(pem, certificate, "ca.key")
        with pytest.raises(FedsieveError, match="holds no certificate"):
            read_certificate("nothing", "it")
        with pytest.raises(FedsieveError, match="is not an authority's"):
            read_certificate(self.pem.decode(), "it")

    def test_the_fingerprint_is_that_of_the_bytes(self) -> None:
        import hashlib

        pem = pem_of(self.authority.certificate)
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
        assert fingerprint(self.authority.certificate).replace(" ", "") == digest


class TestKeys:
    def test_ssh_keygen_sees_the_same_key(self, tmp_path: Path) -> None:
        if shutil.which("ssh-keygen") is None:
            pytest.skip("needs the program ssh-keygen")
        private, public = make_key("site-a")
        write_private(tmp_path / "key", private)
        (tmp_path / "key.pub").write_text(public.line + "\n")

        def ssh_keygen(*words: str) -> str:
            command = ["ssh-keygen", *words]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        derived = ssh_keygen("-y", "-f", str(tmp_path / "key"))
        assert derived.split()[:2] == public.line.split()[:2]
        bits, shown, name, kind = ssh_keygen("-l", "-f", str(tmp_path / "key.pub")).split()
        assert (bits, shown, name, kind) == ("384", public.fingerprint, "site-a", "(ECDSA)")

    def test_a_public_key_comes_back_from_its_file(self, tmp_path: Path) -> None:
        private, public = make_key("site-a")
        (tmp_path / "x.pub").write_text(public.line + "\n")
        (tmp_path / "bare.pub").write_text(" ".join(public.line.split()[:2]))
        write_private(tmp_path / "key", private)
        assert read_public_key(tmp_path / "x.pub").name == "site-a"
        assert read_public_key(tmp_path / "bare.pub").name == "bare"
        assert read_public_key(tmp_path / "x.pub", "b").name == "b"
        assert read_public_key(tmp_path / "x.pub").fingerprint == public.fingerprint
        assert public_half(tmp_path / "key", "site-a").line == public.line

    def test_wrong_files_are_refused(self, tmp_path: Path) -> None:
        private, _ = make_key("site-a")
        (tmp_path / "key").write_bytes(private)
        with pytest.raises(FedsieveError, match="is a private key, which must stay"):
            read_public_key(tmp_path / "key")
        with pytest.raises(FedsieveError, match="There is no key"):
            read_public_key(tmp_path / "missing.pub")
        ed = ed25519.Ed25519PrivateKey.generate().public_key()
        small = ec.generate_private_key(ec.SECP256R1()).public_key()
        for key in (ed, small):
            line = key.public_bytes(
                serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            )
            (tmp_path / "wrong.pub").write_bytes(line)
            with pytest.raises(FedsieveError, match="is not a site's public key"):
                read_public_key(tmp_path / "wrong.pub")
        (tmp_path / "wrong.pub").write_text("nothing")
        with pytest.raises(FedsieveError, match="is not a site's public key"):
            read_public_key(tmp_path / "wrong.pub")
        with pytest.raises(FedsieveError, match="is not a site's private key"):
            public_half(tmp_path / "wrong.pub", "x")

    @pytest.mark.parametrize("name", ["", "../x", ".x", "a/b", "a b", "ä", "x" * 65, "-x", "a\n"])
    def test_a_name_cannot_lead_elsewhere(self, name: str) -> None:
        with pytest.raises(FedsieveError, match="cannot be the name of a site"):
            make_key(name)

    def test_private_files_are_their_owners_only(self, tmp_path: Path) -> None:
        folder = private_folder(tmp_path / "f")
        write_private(folder / "k", b"secret")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "k").stat().st_mode) == 0o600
        check_private(folder / "k")
        (folder / "k").chmod(0o640)
        with pytest.raises(FedsieveError, match="Others on this machine may read"):
            check_private(folder / "k")
        with pytest.raises(FedsieveError, match="There is no key"):
            check_private(folder / "missing")


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "host", "port", "is_loopback", "listen"),
        [
            ("fl.example.org", "fl.example.org", 8000, False, "0.0.0.0"),
            ("fl.example.org:443", "fl.example.org", 443, False, "0.0.0.0"),
            ("10.0.0.7:9000", "10.0.0.7", 9000, False, "0.0.0.0"),
            ("127.0.0.1", "127.0.0.1", 8000, True, "127.0.0.1"),
            ("127.8.8.8:1", "127.8.8.8", 1, True, "127.8.8.8"),
            ("localhost:65535", "localhost", 65535, True, "127.0.0.1"),
            ("::1", "::1", 8000, True, "::1"),
            ("[::1]:9000", "::1", 9000, True, "::1"),
            ("[2001:db8::1]", "2001:db8::1", 8000, False, "::"),
        ],
    )
    def test_ways_to_write_one(
        self, text: str, host: str, port: int, is_loopback: bool, listen: str
    ) -> None:
        address = parse_address(text)
        assert (address.host, address.port) == (host, port)
        assert (address.is_loopback, address.listen_host) == (is_loopback, listen)
        assert parse_address(str(address)) == address

    @pytest.mark.parametrize(
        "text",
        ["", "https://x", "a b", "x:y", "-x", "x/y", "[::1", "a..b", "x:1:2", "x;y", "[x y]"],
    )
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(FedsieveError, match="is not an address"):
            parse_address(text)

    @pytest.mark.parametrize("text", ["x:0", "x:65536"])
    def test_ports_that_cannot_be(self, text: str) -> None:
        with pytest.raises(FedsieveError, match="between 1 and 65535"):
            parse_address(text)

    def test_a_free_port_is_one(self) -> None:
        assert 1024 <= free_port() <= 65535
