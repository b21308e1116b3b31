"""TLS contexts: for a node from its PEM files, and for a client with the certificates that it trusts.

A node on this machine writes its certificate to a note (`home`), and a client trusts exactly this certificate. The
issuer and the name do not matter, so commands and agents on this machine can connect to a loopback address. For any
other hub, the certificate must be trusted by the system, or be in the file that SSL_CERT_FILE names.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from .errors import ConfigError
from .home import node_at

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_WRONG_NAME = (62, 64)
"""Error codes X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH from OpenSSL's x509_vfy.h."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of a node. Raises a `ConfigError` that names the wrong file."""
    # Read both files first: OpenSSL's own errors name neither the file nor the problem.
    read_certificate(certificate)
    text = _read(key, "private key")
    if "PRIVATE KEY-----" not in text:
        raise ConfigError(f"{key} contains no private key in PEM format (-----BEGIN PRIVATE KEY-----).")
    # Refuse an encrypted key: OpenSSL would ask for the passphrase on the terminal, and a service would wait forever.
    if "ENCRYPTED" in text:
        raise ConfigError(f"{key} is encrypted. Store the key without a passphrase, readable only by the node's user.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"The private key {key} does not belong to the certificate {certificate}.") from error
        raise ConfigError(
            f"{certificate} and {key} are not a certificate and its private key: {error.reason or error}."
        ) from error
    return context


def read_certificate(path: Path) -> str:
    """Return the first certificate of a PEM file. Raises `ConfigError` if there is none."""
    match = _CERTIFICATE.search(_read(path, "certificate"))
    if match is None:
        raise ConfigError(f"{path} contains no certificate in PEM format (-----BEGIN CERTIFICATE-----).")
    return match[0]


def client_context(url: str) -> ssl.SSLContext | None:
    """Return the TLS context for the hub at ``url``, or None for an unencrypted connection (``ws://``)."""
    if urlsplit(url).scheme != "wss":
        return None
    node = node_at(url)
    if node is None or not node.certificate:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # trust exactly this certificate, and no other certificate of the same issuer
    # Trust the node's certificate itself, even if a certificate authority has issued it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=node.certificate)
    return context


def explain_failure(url: str, error: OSError) -> str:
    """Return the error text for a connection that could not be opened."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=code) if code in _WRONG_NAME:
            return f"The hub at {url} has a certificate for another name ({error.verify_message}); use that name in the URL."
        case ssl.SSLCertVerificationError():
            return (
                f"The certificate of the hub at {url} is not trusted here ({error.verify_message}). If you trust this hub, "
                "set SSL_CERT_FILE to a PEM file that contains its certificate or its issuer's certificate."
            )
        case ConnectionResetError() if urlsplit(url).scheme == "wss":
            return f"The server at {url} closed the connection during the TLS handshake. If it does not use TLS, write ws://."
        case ssl.SSLError():
            detail = error.reason or str(error)
            return f"The server at {url} does not speak TLS ({detail}). If it does not use TLS, write ws://."
        case _:
            detail = str(error) or type(error).__name__
            return f"No hub answers at {url} ({detail}); start one with: roundelay up"


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"Cannot read the {what} {path}: {error.strerror}.") from error
