"""The CPU overlay on machines of their own, with the TLS of the others: ranks in two pods answer, and only certificates open."""

from __future__ import annotations

import functools
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from outrider.configs.schema import REPOSITORY
from outrider.experiments.faults.machines import why_not
from outrider.experiments.faults.manifest_cluster import RENDERED, ManifestCluster
from outrider.experiments.faults.nodes import OVERLAY, bearer
from tests.helpers.network import ending_tls
from tests.k8s.made_secrets import CERTIFICATE, Made, make_certificate, make_secrets

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
SECURED = "multi-node"  # the overlay whose init containers and environment the pods are given
CHALLENGE = b"#CHALLENGE#"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # how a client of gRPC begins, with its settings
HEARS_S = 2.0
HEAD = "outrider-head-svc.outrider.svc.cluster.local"
SETTINGS = {
    "model": {"dtype": "float32"},
    "parallelism": {"mode": "lookahead", "world_size": 2, "placement": "STRICT_SPREAD", "rank_timeout_s": 5.0, "adaptive": False},
    "server": {"replicas": 1},
}


class TlsCluster(ManifestCluster):
    """Each pod with the certificate that its init container makes, and the head with TLS to the Redis of its state."""

    def __init__(self, made: Made, folder: Path, parts: ExitStack) -> None:
        self.certificates = folder
        made.write("outrider-ray-tls", folder / "authority")
        made.write("outrider-gcs-redis-tls", folder / "gcs-redis")
        documents = yaml.safe_load_all((RENDERED / f"{SECURED}.yaml").read_text(encoding="utf-8"))
        cluster = next(each["spec"]["rayClusterConfig"] for each in documents if each["kind"] == "RayService")
        groups = {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
        self._templates = {name: group["template"]["spec"] for name, group in groups.items()}
        super().__init__(OVERLAY, REPOSITORY / "demo_model", SETTINGS)
        host, _, port = self.state.address.partition(":")
        secured = ending_tls(folder / "gcs-redis" / "tls.crt", folder / "gcs-redis" / "tls.key", int(port), host)
        self.redis = f"rediss://{host}:{parts.enter_context(secured)}"

    def start(self, name: str) -> None:
        """Runs the pod's init container first."""
        (maker,) = self._templates[name.partition("-")[0]]["initContainers"]
        folder = self.certificates / name
        folder.mkdir(exist_ok=True)
        environment = {"PATH": os.environ["PATH"], "POD_IP": self.machine(name).address}
        subprocess.run([self._here(name, word) for word in (*maker["command"], *maker["args"])], env=environment, check=True)
        super().start(name)

    def environment(self, name: str) -> dict[str, str]:
        """As KubeRay has it, with what the overlay says of TLS."""
        container = self._templates[name.partition("-")[0]]["containers"][0]
        found = super().environment(name)
        found |= {each["name"]: self._here(name, each["value"]) for each in container["env"] if each["name"].startswith("RAY_")}
        if name == "head":
            found |= {"RAY_REDIS_ADDRESS": self.redis, "RAY_REDIS_CA_CERT": str(self.certificates / "gcs-redis" / "ca.crt")}
        return found

    def _here(self, name: str, word: str) -> str:
        """A word of the manifest with this machine's paths."""
        files = {"/etc/outrider/certificate": CERTIFICATE.parent, "/etc/outrider/authority": self.certificates / "authority"}
        files |= {"/etc/outrider/tls": self.certificates / name, "$(FQ_RAY_IP)": Path(HEAD)}
        return functools.reduce(lambda found, pair: found.replace(pair[0], str(pair[1])), files.items(), word)

    def ports(self, name: str) -> set[int]:
        """At which somebody listens on a machine."""
        pid = self.machine(name).pids()[0]
        lines = [
            line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
        ]
        return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}

    def hears(self, name: str, port: int, says: bytes = b"", certificate: Path | None = None) -> bytes:
        """What comes first from a machine's port, encrypted where there is a certificate to show; nothing where nothing comes."""
        try:
            with socket.create_connection((self.machine(name).address, port), HEARS_S) as raw, ExitStack() as parts:
                end = raw
                if certificate is not None:
                    context = ssl.create_default_context(cafile=str(self.certificates / "authority" / "ca.crt"))
                    context.load_cert_chain(certificate / "tls.crt", certificate / "tls.key")
                    end = parts.enter_context(context.wrap_socket(raw, server_hostname=self.machine(name).address))
                end.sendall(says)
                return end.recv(4096)
        except OSError:
            return b""


@pytest.fixture(scope="module")
def made() -> Made:
    return make_secrets()


@pytest.fixture(scope="module")
def cluster(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    with ExitStack() as parts, TlsCluster(made, tmp_path_factory.mktemp("tls"), parts) as started:
        yield started


def test_a_chat_is_answered_by_ranks_in_two_pods(cluster: TlsCluster) -> None:
    asked = {"model": cluster.model_name, "messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 48}
    url = f"{cluster.urls[0]}/v1/chat/completions"
    for extra in ({}, {"stream": True}):
        answer = httpx.post(url, json=asked | extra, headers=bearer(cluster.key), timeout=120)
        assert answer.status_code == 200, answer.text
        assert '"finish_reason":"' in answer.text.replace(" ", "")
    health = httpx.get(f"{cluster.urls[0]}/health").json()
    ranks = health["ranks"]
    assert (health["status"], ranks["ready"], ranks["of"], ranks["losses"], ranks["disagreements"]) == ("ok", 2, 2, 0, 0), health


def on_all_ports(cluster: TlsCluster, says: bytes = b"", certificate: Path | None = None) -> dict[tuple[str, int], bytes]:
    """What each machine's ports answer."""
    places = [(name, port) for name in cluster.machines.by_name for port in sorted(cluster.ports(name))]
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(places, pool.map(lambda place: cluster.hears(*place, says, certificate), places), strict=True))


def test_nothing_of_ray_s_speaks_in_the_clear(cluster: TlsCluster) -> None:
    heard = on_all_ports(cluster, HTTP2)
    assert ("head", 6379) in heard and len(heard) > 20
    assert [place for place, answer in heard.items() if answer[3:4] == b"\x04"] == []  # the settings of a gRPC server


def test_ray_answers_who_has_a_certificate(cluster: TlsCluster) -> None:
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "health-check",
        "--address",
        f"{cluster.machine('head').address}:6379",
    ]
    given = cluster.environment("api-0")
    without = {name: value for name, value in given.items() if not name.startswith(("RAY_USE_TLS", "RAY_TLS"))}
    assert subprocess.run(command, env=given, capture_output=True, timeout=120, check=False).returncode == 0
    assert subprocess.run(command, env=without, capture_output=True, timeout=120, check=False).returncode != 0


def test_the_redis_of_the_head_is_known_by_its_authority(cluster: TlsCluster, tmp_path: Path) -> None:
    """By the code with which KubeRay clears up there; another authority ends the process."""
    make_secrets().write("outrider-gcs-redis-tls", tmp_path)
    host, _, port = cluster.redis.removeprefix("rediss://").partition(":")
    asked = f"cleanup_redis_storage({host!r}, {port}, '', use_ssl=True, storage_namespace='nobody')"
    command = [sys.executable, "-c", f"from ray._private.gcs_utils import cleanup_redis_storage; assert {asked}"]
    for folder, believed in ((cluster.certificates / "gcs-redis", True), (tmp_path, False)):
        environment = os.environ | {"RAY_REDIS_CA_CERT": str(folder / "ca.crt"), "RAY_redis_db_connect_retries": "2"}
        told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert (told.returncode == 0) is believed, told.stderr[-2000:]


def test_a_rank_asks_for_the_secret_whom_it_believes(cluster: TlsCluster, tmp_path: Path) -> None:
    heard = on_all_ports(cluster, certificate=cluster.certificates / "api-0")
    (rank,) = [place for place, answer in heard.items() if CHALLENGE in answer]
    assert rank[0].startswith("engine-")
    assert [place for place, answer in on_all_ports(cluster).items() if CHALLENGE in answer] == []
    make_secrets().write("outrider-ray-tls", tmp_path / "others")
    stranger = make_certificate(tmp_path / "others", tmp_path / "stranger", cluster.machines.address)
    assert cluster.hears(*rank, certificate=stranger) == b""
