"""HTTPS with a certificate of the operator: the same answers, and wrong files are refused by the name of their option."""

import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from fake_frontend import MODEL, Running, running_server

from headrace.api.runtime import Runtime
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.server.address import check_certificate
from headrace.server.listener import MAX_HEADER_BYTES

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem with its key.pem, both.pem, the key other.pem of nothing, the encrypted locked.pem, and text.pem."""
    folder = tmp_path_factory.mktemp("certificates")
    cert, key, other, locked = (str(folder / f"{name}.pem") for name in ("cert", "key", "other", "locked"))
    for path in (key, other):
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)
    openssl("req", "-x509", "-new", "-key", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")  # fmt: skip
    openssl("ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked)
    (folder / "both.pem").write_bytes(Path(cert).read_bytes() + Path(key).read_bytes())
    (folder / "text.pem").write_text("no certificate\n")
    return folder


@pytest.fixture(scope="module")
def https(folder: Path):
    with running_server(ssl_certfile=str(folder / "cert.pem"), ssl_keyfile=str(folder / "key.pem")) as running:
        yield running


@pytest.fixture
def client(https: Running, folder: Path):
    https.frontend.reset()
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    with httpx.Client(base_url=https.url, verify=context, timeout=20) as client:
        yield client


def test_answers_and_streams_are_those_of_http(client: httpx.Client, https: Running, server: Running):
    assert https.url.startswith("https://")
    body = {"model": MODEL, "prompt": "hi", "seed": 1}
    secure = client.post("/v1/completions", json=body).json()
    plain = httpx.post(server.url + "/v1/completions", json=body).json()
    assert secure["choices"] == plain["choices"]

    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == secure["choices"][0]["text"]


def test_clients_without_our_certificate_or_without_tls_get_nothing(https: Running, client: httpx.Client):
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(https.url + "/ping")
    with pytest.raises(httpx.TransportError):
        httpx.get(https.url.replace("https", "http") + "/ping")
    assert client.get("/ping").status_code == 200


def test_a_refusal_before_the_request_is_complete_arrives(https: Running, folder: Path):
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    address = ("127.0.0.1", https.server.port)
    with socket.create_connection(address, 20) as raw, context.wrap_socket(raw, server_hostname="localhost") as secure:
        secure.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * (MAX_HEADER_BYTES + 1))
        reply = b""
        while part := secure.recv(65536):
            reply += part
    assert reply.startswith(b"HTTP/1.1 431 ")


def test_the_key_may_be_in_the_same_file(folder: Path):
    with running_server(ssl_certfile=str(folder / "both.pem")) as running:
        context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        assert httpx.get(running.url + "/ping", verify=context).status_code == 200


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("missing", "key", r"--ssl-certfile .*: cannot be read \(No such file"),
        ("cert", "missing", r"--ssl-keyfile .*: cannot be read \(No such file"),
        ("cert", "other", "--ssl-keyfile: this is not the key of the certificate"),
        ("cert", "locked", "--ssl-keyfile: the key is encrypted"),
        ("text", "key", "--ssl-certfile and --ssl-keyfile: not a certificate in PEM"),
        ("cert", "text", "--ssl-certfile and --ssl-keyfile: not a certificate in PEM"),
        ("cert", None, "--ssl-certfile: not a certificate in PEM and its private key"),
    ],
)
def test_wrong_files_are_refused_before_anything_is_served(folder: Path, cert: str, key: str | None, said: str):
    files = {name: str(folder / f"{file}.pem") for name, file in (("ssl_certfile", cert), ("ssl_keyfile", key)) if file}
    with pytest.raises(ConfigError, match=said):
        check_certificate(ServerArgs(**files))


def test_a_key_alone_and_a_runtime_with_tls_are_refused():
    with pytest.raises(ConfigError, match="--ssl-keyfile needs --ssl-certfile"):
        check_certificate(ServerArgs(ssl_keyfile="key.pem"))
    with pytest.raises(ConfigError, match="without TLS"):
        Runtime(ssl_certfile="cert.pem")
