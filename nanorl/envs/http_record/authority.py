"""`RunAuthority`: the certificates of one run, made for its proxy and gone with it.

Clients of the run trust `pem` and nothing else, so that HTTPS can be recorded too. The private key
never leaves the proxy's process, and every host gets its certificate when it is first asked for.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS = 90
_SLACK = datetime.timedelta(days=1)  # clocks differ
_MOST_HOSTS = 1024


class RunAuthority:
    """Signs certificates for hosts."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._host_key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nanorl recording proxy")])
        self._certificate = self._sign_own()
        self.context = lru_cache(_MOST_HOSTS)(self._context)
        """The TLS context of a server that is `host`."""

    @property
    def pem(self) -> bytes:
        """The certificate that clients have to trust, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def _context(self, host: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        key = self._host_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        chain = self._sign(host).public_bytes(serialization.Encoding.PEM)
        with tempfile.NamedTemporaryFile() as file:  # ssl reads files only; this one is ours alone
            Path(file.name).write_bytes(key + chain)
            context.load_cert_chain(file.name)
        return context

    def _sign_own(self) -> x509.Certificate:
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        return (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def _sign(self, host: str) -> x509.Certificate:
        try:
            alternative: x509.GeneralName = x509.IPAddress(ip_address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        subject = x509.Name([])  # the name that counts is the alternative one (RFC 6125)
        return (
            self._builder(subject, self._host_key.public_key())
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SLACK)
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(authority, critical=False)
        )
