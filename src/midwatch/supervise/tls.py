"""Encrypted connections between agents and coordinator, where a certificate is configured.

Messages are signed with the run's token in any case, so nobody can forge or replay them; TLS keeps others on the
network from reading them (log lines, paths, command lines). The coordinator publishes its certificate where the token
lies, and clients trust exactly that one: no authority, and no host names, for agents connect to bare addresses.
"""

from __future__ import annotations

import re
import ssl
from typing import Final

from midwatch.config import SecureConfig, expand_path
from midwatch.core import ConfigError, ProtocolError

_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


def read_certificate(config: SecureConfig) -> str:
    """The certificate that this node's coordinator shows, as PEM; empty where none is configured.

    Raises:
        ConfigError: CF102 certificate and key cannot be used, or others can read the key.
    """
    if not config.tls_cert and not config.tls_key:
        return ""
    if not config.tls_cert:
        raise ConfigError("CF102", "secure.tls_key: without secure.tls_cert it is of no use")
    key = expand_path("secure.tls_key", config.tls_key or config.tls_cert)
    try:
        if key.stat().st_mode & 0o077:
            raise ConfigError("CF102", f"secure.tls_key: {key} is open to others", hint=f"chmod 600 {key}")
        server_context(config)
        found = _CERTIFICATE.search(expand_path("secure.tls_cert", config.tls_cert).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("CF102", f"secure.tls_cert: {config.tls_cert} cannot be used: {error}") from error
    # The first one is the server's own; what follows leads to an authority that nobody asks.
    assert found is not None, "the server context has read it"
    return found[0]


def server_context(config: SecureConfig) -> ssl.SSLContext:
    """For the listening side. Raises OSError (``ssl.SSLError`` is one) when the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificate = expand_path("secure.tls_cert", config.tls_cert)
    key = expand_path("secure.tls_key", config.tls_key) if config.tls_key else certificate
    # A password cannot be asked for: nobody is there.
    context.load_cert_chain(certificate, key, password=lambda: "")
    return context


def client_context() -> ssl.SSLContext:
    """For the connecting side: trusts nobody until ``trust`` names a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    # The certificate itself is what is trusted, whoever has signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def trust(context: ssl.SSLContext, certificate: str) -> None:
    """Trust this certificate as well.

    Raises:
        ProtocolError: PR104 it is none.
    """
    try:
        if certificate:
            context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise ProtocolError("PR104", f"what should be the coordinator's certificate is none: {error}") from error
