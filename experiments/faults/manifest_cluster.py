"""A ``RayService`` of ``k8s/rendered`` on machines of network namespaces: what KubeRay does with it, done here.

Every pod is a machine that runs ``ray start`` with its group's ``rayStartParams`` and the CPUs of its limits; the Serve
configuration goes to the head's dashboard. Redis for the replicas' memory and Redis for Ray's own state run beside them. There
are no volumes, and no TLS to Redis: of the Serve configuration two paths and the address of Redis are replaced, nothing else; of
Ray's flags the size of the object stores, which share one machine's memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from cache_service.namespace import hash_key
from cluster.cli.launch.preflight import SECRET_VARIABLE
from experiments.bench.record import ROOT
from experiments.faults.machines import Machine, Machines, MachinesError
from experiments.faults.redis_process import RedisProcess

RENDERED = ROOT / "k8s" / "rendered"
TENANT = "acme"
_START_S, _POLL_S, _OBJECTS = 300.0, 0.25, 200_000_000
_GCS_PORT, _DASHBOARD_PORT = 6379, 8265


class ManifestCluster:
    """Head, API and engines of an overlay. ``with`` starts them and ends with all of them gone."""

    def __init__(self, overlay: str, model: Path, settings: Mapping[str, Mapping[str, Any]], spare: Sequence[str] = ()) -> None:
        """
        Args:
            overlay: of ``k8s/overlays``; one that computes on processors.
            model: folder that stands for the overlay's volume.
            settings: by section, on top of the overlay's.
            spare: machines that are there and not started, such as ``engine-2``.

        Raises:
            MachinesError: see ``Machines``.
            cache_service.store.embedded.EmbeddedRedisError: see ``RedisProcess``.
        """
        documents = [each for each in yaml.safe_load_all((RENDERED / f"{overlay}.yaml").read_text(encoding="utf-8")) if each]
        self._spec = next(each["spec"] for each in documents if each["kind"] == "RayService")
        self._variables = next(each["data"] for each in documents if each["metadata"]["name"] == "outrider-env")
        cluster = self._spec["rayClusterConfig"]
        self._pods: dict[str, Mapping[str, Any]] = {"head": cluster["headGroupSpec"]}
        for group in cluster["workerGroupSpecs"]:
            self._pods |= {f"{group['groupName']}-{number}": group for number in range(group["replicas"])}
        self._first = tuple(self._pods)
        self._pods |= {name: self._pods[f"{name.partition('-')[0]}-0"] for name in spare}
        self._folder = Path(tempfile.mkdtemp(prefix="outr-", dir="/tmp"))  # sockets below it have paths of 107 characters
        self._parts = contextlib.ExitStack()
        self._parts.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self.key, self.admin_key, self._token = (secrets.token_urlsafe(16) for _ in range(3))
        self.keys_file = self._folder / "keys.yaml"
        self.give_key(self.key)
        self._sessions = self._folder / "ray"
        self._sessions.mkdir()
        with contextlib.ExitStack() as parts:
            parts.callback(self.close)
            self.machines = self._parts.enter_context(Machines(tuple(self._pods), self._sessions))
            host = self.machines.address
            self.memory, self.state = (self._parts.enter_context(RedisProcess(host, has_files=True)) for _ in range(2))
            self.serve_config = self._replaced(yaml.safe_load(self._spec["serveConfigV2"]), model)
            self.model, self.model_name = model, model.name
            self.set(settings)
            parts.pop_all()

    @property
    def urls(self) -> list[str]:
        """Where clients are: the Service of the manifests is the APIs' machines."""
        machines = [machine for name, machine in self.machines.by_name.items() if name.startswith("api-")]
        return [f"http://{machine.address}:{self.serve_config['http_options']['port']}" for machine in machines]

    @property
    def log(self) -> Path:
        """What all machines' processes say."""
        return self._folder / "machines.log"

    def machine(self, name: str) -> Machine:
        """Of a pod: ``head``, ``api-0``, ``engine-0``, ..."""
        return self.machines.by_name[name]

    def give_key(self, key: str) -> None:
        """Has the tenant have this key and no other, as a secret that was changed."""
        text = yaml.safe_dump({"tenants": {TENANT: {"keys": [hash_key(key)]}}, "admin_keys": [hash_key(self.admin_key)]})
        written = self.keys_file.with_suffix(".new")
        written.write_text(text, encoding="utf-8")
        written.replace(self.keys_file)

    def set(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Changes what the next ``deploy`` brings, by section."""
        (application,) = self.serve_config["applications"]
        for section, values in settings.items():
            application["args"].setdefault(section, {}).update(values)

    def start(self, name: str) -> None:
        """Starts Ray on a machine, as KubeRay starts a pod's."""
        machine, group = self.machine(name), self._pods[name]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        params = {"num-cpus": str(limits["cpu"]), **group["rayStartParams"], "object-store-memory": str(_OBJECTS)}
        if "resources" in params:
            params["resources"] = json.loads(params["resources"])  # quoted for the shell that starts it in a pod
        params |= {"node-ip-address": machine.address, "disable-usage-stats": "", "block": ""}
        if name == "head":
            params |= {"head": "", "port": str(_GCS_PORT), "dashboard-host": machine.address, "temp-dir": str(self._sessions)}
            params |= {"dashboard-port": str(_DASHBOARD_PORT), "include-dashboard": "true"}
        else:
            params["address"] = f"{self.machine('head').address}:{_GCS_PORT}"
        flags = [f"--{flag}={value}" if value else f"--{flag}" for flag, value in params.items()]
        machine.start([sys.executable, "-m", "ray.scripts.scripts", "start", *flags], self.environment(name), self.log)

    def environment(self, name: str) -> dict[str, str]:
        """What a pod's container is given."""
        found = os.environ | self._variables | {
            "HOME": str(self._folder), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
            "PYTHONPATH": str(ROOT), SECRET_VARIABLE: self._token, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token,
        }  # fmt: skip
        if name == "head":
            return found | {"RAY_REDIS_ADDRESS": self.state.address, "RAY_REDIS_CA_CERT": ""}  # Ray reads the file in any case
        return found | {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}  # as KubeRay, with a state that outlives the head

    def deploy(self) -> None:
        """Hands the Serve configuration to the head, as KubeRay does; returns when it is taken.

        Raises:
            MachinesError: it is refused, or the head does not answer in time.
        """
        deadline = time.monotonic() + _START_S
        while True:
            try:
                answer = httpx.put(self._applications, json=self.serve_config, headers=self._bearer, timeout=30)
            except httpx.TransportError as error:
                fault = str(error)
            else:
                if answer.is_success:
                    return
                fault = f"{answer.status_code} {answer.text[:400]}"
            if time.monotonic() > deadline:
                raise MachinesError(f"the head does not take the Serve configuration: {fault}")
            time.sleep(_POLL_S)

    def applications(self) -> dict[str, Any]:
        """What the head says of the Serve applications, as KubeRay asks it."""
        answer = httpx.get(self._applications, headers=self._bearer, timeout=30).raise_for_status()
        found: dict[str, Any] = answer.json()["applications"]
        return found

    def until_running(self, timeout_s: float = _START_S) -> float:
        """Waits until the head says that the application runs; the seconds that took.

        Raises:
            MachinesError: it does not in time; the message has what it said last.
        """
        began, last = time.monotonic(), "nothing"
        while time.monotonic() - began < timeout_s:
            try:
                last = self.applications()["outrider"]["status"]
            except (httpx.HTTPError, KeyError, ValueError) as error:  # a head that starts answers late, or knows nothing yet
                last = str(error)
            if last == "RUNNING":
                return round(time.monotonic() - began, 2)
            self._restart_ended()
            time.sleep(_POLL_S)
        raise MachinesError(f"the application does not run within {timeout_s:.0f} s: {last}")

    def until(self, path: str, says: Mapping[str, Any], timeout_s: float = _START_S) -> float:
        """Waits until a route of each API says something with status 200; the seconds that took.

        Example: ``until("/health", {"status": "ok", "replicas": 2})``.

        Raises:
            MachinesError: it does not in time; the message has what it said last.
        """
        began, last = time.monotonic(), "nothing"
        while time.monotonic() - began < timeout_s:
            try:
                for url in self.urls:
                    answer = httpx.get(f"{url}{path}", timeout=5)
                    last = f"{answer.status_code} {answer.text[:300]}"
                    if answer.status_code != 200 or not says.items() <= answer.json().items():
                        break
                else:
                    return round(time.monotonic() - began, 2)
            except (httpx.TransportError, ValueError) as error:
                last = str(error)
            self._restart_ended()
            time.sleep(_POLL_S)
        raise MachinesError(f"{path} does not say {dict(says)} within {timeout_s:.0f} s: {last}")

    def _restart_ended(self) -> None:
        """Starts Ray again where it ended by itself, as the kubelet does with a container, and says so."""
        for name, machine in self.machines.by_name.items():
            if machine.ended:
                said = self.log.read_text(errors="replace")[-500:]
                print(f"the Ray of {name} ended by itself and is started again: {said}", file=sys.stderr)
                machine.kill()
                self.start(name)

    def __enter__(self) -> ManifestCluster:
        try:
            for name in self._first:
                self.start(name)
            self.deploy()
            self.until("/ready", {"status": "ready"})
        except BaseException:
            print(self.log.read_text(errors="replace")[-3000:], file=sys.stderr)
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends all of it. Harmless when repeated."""
        self._parts.close()

    @property
    def _applications(self) -> str:
        return f"http://{self.machine('head').address}:{_DASHBOARD_PORT}/api/serve/applications/"

    @property
    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _replaced(self, document: dict[str, Any], model: Path) -> dict[str, Any]:
        """The Serve configuration with the paths and the Redis of this machine, and nothing else changed."""
        (application,) = document["applications"]
        application["args"]["model"]["path"] = str(model)
        application["args"]["tenancy"]["keys_file"] = str(self.keys_file)
        application["args"]["redis_url"] = self.memory.url
        return document
