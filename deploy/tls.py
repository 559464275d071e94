"""certificate files -> the context with which a listener speaks TLS, renewed when they are; and one that trusts just them."""

from __future__ import annotations

import ssl
from pathlib import Path

import structlog

from paceline.cluster.config import TlsConfig
from paceline.cluster.errors import ConfigError

log = structlog.get_logger(__name__)

Stamp = tuple[tuple[int, int], ...]


class Certificate:
    """What a listener shows. `context` stays the same object for the listener's life; what it holds is renewed."""

    def __init__(self, tls: TlsConfig, section: str) -> None:
        """`section`: gateway or control, for messages.

        Raises:
            ConfigError: the files cannot be used; the message names the field.
        """
        self._tls = tls
        self._section = section
        self._stamp = self._stamp_now()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()

    def refresh(self) -> None:
        """Take renewed files for the connections to come. Half renewed ones are left until they fit together."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            self._load()
        except ConfigError as error:
            log.warning("certificate_not_renewed", reason=str(error))
            return
        self._stamp = stamp
        log.info("certificate_renewed", section=self._section)

    def _load(self) -> None:
        # First into a context that nobody uses: a failure leaves a context with a certificate and no key.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            for name, path in (("cert", self._tls.cert), ("key", self._tls.key)):
                if not Path(path).is_file():
                    raise ConfigError(f"{self._section}.tls.{name}={path!r}: no such file on this machine")
            try:
                # A key with a passphrase would ask the terminal for it.
                context.load_cert_chain(self._tls.cert, self._tls.key, password=lambda: "")
            except (OSError, ValueError) as error:
                reason = getattr(error, "reason", "") or str(error)
                raise ConfigError(
                    f"{self._section}.tls: {self._tls.cert} and {self._tls.key}: expected a PEM certificate and its private key "
                    f"without a passphrase: {reason}"
                ) from None

    def _stamp_now(self) -> Stamp:
        found = []
        for path in (self._tls.cert, self._tls.key):
            try:
                status = Path(path).stat()
                found.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                found.append((0, 0))
        return tuple(found)


def certificate_of(tls: TlsConfig, section: str) -> Certificate | None:
    """What a listener shows; None for plain HTTP.

    Raises:
        ConfigError: the files cannot be used.
    """
    return Certificate(tls, section) if tls.is_on else None


def trust(*certs: str) -> ssl.SSLContext | bool:
    """How a client on the same machine checks listeners with these certificates, whatever names are in them.

    Only who has a private key of one of them, or of one in their chains, is believed. none is plain HTTP.
    """
    files = [cert for cert in certs if cert != "none"]
    if not files:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    for file in files:
        try:
            context.load_verify_locations(cafile=file)
        except OSError as error:
            raise ConfigError(f"tls.cert={file!r}: cannot be read: {error}") from None
    return context
