"""Ports, certificates, and TLS in front of servers that have none."""

from __future__ import annotations

import asyncio
import queue
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    """A free one whose bus port as a node of Redis Cluster (10000 above) exists, too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


def certificate(folder: Path) -> tuple[Path, Path]:
    """One for this machine, of its own making, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr
    return certificate, key


@contextmanager
def ending_tls(certificate: Path, key: Path, port: int, host: str = "127.0.0.1") -> Iterator[int]:
    """The port of a proxy on a host that ends TLS with this certificate and passes everything on to a port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            return  # one end is gone, and with it the other
        finally:
            writer.close()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

    ports: queue.Queue[int] = queue.Queue()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(converse, host, 0, ssl=context)
        ports.put(server.sockets[0].getsockname()[1])
        await over.wait()
        server.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # which cancels, in the end, what goes on
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ports.get(timeout=20)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
