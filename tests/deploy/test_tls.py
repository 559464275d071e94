"""TLS by files: served, verified, renewed without a restart, and refused with the field's name where they do not fit."""

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
import structlog.testing
from fastapi import FastAPI

from paceline.cluster.config import TlsConfig
from paceline.cluster.errors import ConfigError
from paceline.deploy.replicas import _HttpListener
from paceline.deploy.tls import Certificate, certificate_of, trust


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make(folder: Path, name: str) -> TlsConfig:
    """A self-signed pair, as anybody makes one."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "2", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return TlsConfig(cert=str(cert), key=str(key))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsConfig, TlsConfig]:
    folder = tmp_path_factory.mktemp("tls")
    return make(folder, "old"), make(folder, "new")


def replace(used: TlsConfig, new: TlsConfig, *names: str) -> None:
    for name in names:
        Path(getattr(used, name)).write_bytes(Path(getattr(new, name)).read_bytes())


async def test_a_listener_shows_the_certificate_and_takes_a_renewed_one(
    pairs: tuple[TlsConfig, TlsConfig], tmp_path: Path
) -> None:
    """Clients that trust the old one alone fail from then on: the new one is really what is shown."""
    old, new = pairs
    used = TlsConfig(cert=str(tmp_path / "cert"), key=str(tmp_path / "key"))
    replace(used, old, "cert", "key")
    app = FastAPI()
    app.get("/health")(lambda: {"status": "ok"})
    port = free_port()
    listener = _HttpListener(app, "127.0.0.1", port, 5.0, certificate=certificate_of(used, "gateway"))
    url = f"https://127.0.0.1:{port}/health"

    async def answer(tls: TlsConfig) -> int:
        async with httpx.AsyncClient(verify=trust(tls.cert), trust_env=False) as client:
            return (await client.get(url)).status_code

    await listener.start()
    try:
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await answer(old) == 200
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await answer(new)
            with pytest.raises(httpx.HTTPError):
                async with httpx.AsyncClient(trust_env=False) as plain:
                    await plain.get(url.replace("https", "http"))
            replace(used, new, "cert")
            with structlog.testing.capture_logs() as logged:
                listener.check()
                assert await answer(old) == 200, "half renewed: the old pair goes on"
                replace(used, new, "key")
                listener.check()
            assert await answer(new) == 200
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await answer(old)
    finally:
        await listener.close(1.0)

    assert [event["event"] for event in logged] == ["certificate_not_renewed", "certificate_renewed"]


def test_files_that_do_not_fit_are_named(pairs: tuple[TlsConfig, TlsConfig], tmp_path: Path) -> None:
    old, new = pairs
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", old.key, "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    (tmp_path / "text").write_text("no certificate")
    for cert, key, field in (
        ("/nowhere.pem", old.key, r"gateway\.tls\.cert='/nowhere\.pem': no such file"),
        (old.cert, "/nowhere.key", r"gateway\.tls\.key='/nowhere\.key': no such file"),
        (old.cert, new.key, r"gateway\.tls: .*expected a PEM certificate and its private key"),
        (str(tmp_path / "text"), old.key, r"gateway\.tls: "),
        (old.cert, str(locked), r"gateway\.tls: .*passphrase"),
    ):
        with pytest.raises(ConfigError, match=field):
            Certificate(TlsConfig(cert=cert, key=key), "gateway")
    assert certificate_of(TlsConfig(), "gateway") is None


def test_nothing_older_than_tls_1_2_is_spoken(pairs: tuple[TlsConfig, TlsConfig]) -> None:
    assert Certificate(pairs[0], "gateway").context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_client_trusts_what_it_was_given_and_the_platform_else(pairs: tuple[TlsConfig, TlsConfig]) -> None:
    assert trust("none", "none") is True
    found = trust(pairs[0].cert, "none", pairs[1].cert)
    assert isinstance(found, ssl.SSLContext) and len(found.get_ca_certs()) == 2
    assert found.verify_mode is ssl.CERT_REQUIRED
    with pytest.raises(ConfigError, match="nowhere"):
        trust("/nowhere.pem")
