"""TLS at both ends: a node's context from its PEM files, and which certificate a client takes for a hub's.

A node of this machine is known by the very certificate that its note (`home`) holds, whoever issued it and whatever
name it is for: so commands and agents here reach it by loopback. Any other hub's must be trusted by the system, or by
what SSL_CERT_FILE names."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from .errors import ConfigError
from .home import node_at

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_WRONG_NAME = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A node's context. Raises `ConfigError` that names the file which is wrong."""
    read_certificate(certificate)
    text = _read(key, "private key")
    if "PRIVATE KEY-----" not in text:
        raise ConfigError(f"{key} holds no private key in PEM form (-----BEGIN PRIVATE KEY-----).")
    if "ENCRYPTED" in text:
        raise ConfigError(f"{key} is encrypted; keep it without a passphrase, readable by the node only.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"The private key {key} does not belong to the certificate {certificate}.") from error
        raise ConfigError(
            f"{certificate} and {key} are no certificate and its private key: {error.reason or error}."
        ) from error
    return context


def read_certificate(path: Path) -> str:
    """The certificate of a PEM file, the first one of a chain. Raises `ConfigError`."""
    found = _CERTIFICATE.search(_read(path, "certificate"))
    if found is None:
        raise ConfigError(f"{path} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----).")
    return found[0]


def client_context(url: str) -> ssl.SSLContext | None:
    """What a client of the hub at ``url`` trusts; None if nothing is encrypted there (``ws://``)."""
    if urlsplit(url).scheme != "wss":
        return None
    node = node_at(url)
    if node is None or not node.certificate:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is this one certificate, and no other that the same issuer signed
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=node.certificate)
    return context


def explain_failure(url: str, error: OSError) -> str:
    """The sentence for a connection that could not be opened."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=code) if code in _WRONG_NAME:
            return (
                f"The hub at {url} has a certificate for another name ({error.verify_message}); connect by that name."
            )
        case ssl.SSLCertVerificationError():
            return (
                f"The certificate of the hub at {url} is not trusted here ({error.verify_message}); if it is the "
                "right one, let "
                "SSL_CERT_FILE name a PEM file that holds it, or its issuer's."
            )
        case ConnectionResetError() if urlsplit(url).scheme == "wss":
            return f"What listens at {url} broke off when TLS was to begin; if nothing is encrypted there, write ws://."
        case ssl.SSLError():
            detail = error.reason or str(error)
            return f"What listens at {url} does not speak TLS ({detail}); if nothing is encrypted there, write ws://."
        case _:
            detail = str(error) or type(error).__name__
            return f"No hub answers at {url} ({detail}); start one with: roundelay up"


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"Cannot read the {what} {path}: {error.strerror}.") from error
