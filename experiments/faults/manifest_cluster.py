"""A ``RayService`` of ``k8s/rendered`` on machines of network namespaces, started as KubeRay starts it.

Every pod is a machine that runs ``ray start`` with its group's ``rayStartParams`` and the CPUs of its limits. The Serve
configuration goes to the head's dashboard. Redis for the replicas' memory and Redis for Ray's own state run beside them. The
Serve configuration is changed in two paths and the address of Redis, because there are no volumes and no TLS to Redis. Ray's
flags are changed in the size of the object stores, which share the memory of one machine.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from outrider.cache_service.namespace import hash_key
from outrider.cluster.cli.launch.preflight import SECRET_VARIABLE
from outrider.experiments.bench.record import ROOT
from outrider.experiments.faults.machines import Machine, Machines, MachinesError
from outrider.experiments.faults.redis_process import RedisProcess

RENDERED = ROOT / "k8s" / "rendered"
TENANT = "acme"
_START_S, _POLL_S, _OBJECTS = 300.0, 0.25, 200_000_000
_GCS_PORT, _DASHBOARD_PORT = 6379, 8265


class ManifestCluster:
    """Head, API and engines of an overlay; ``with`` starts them and ends all of them."""

    def __init__(self, overlay: str, model: Path, settings: Mapping[str, Mapping[str, Any]], spare: Sequence[str] = ()) -> None:
        """Make the machines and both Redis.

        Args:
            overlay: of ``k8s/overlays``; one that computes on processors.
            model: folder, replaces the overlay's volume.
            settings: by section, in addition to the overlay's.
            spare: machines that are made and not started, such as ``engine-2``.

        Raises:
            MachinesError: see ``Machines``.
            EmbeddedRedisError: see ``RedisProcess``.
        """
        documents = [each for each in yaml.safe_load_all((RENDERED / f"{overlay}.yaml").read_text(encoding="utf-8")) if each]
        spec = next(each["spec"] for each in documents if each["kind"] == "RayService")
        self._variables = next(each["data"] for each in documents if each["metadata"]["name"] == "outrider-env")
        cluster = spec["rayClusterConfig"]
        self._pods: dict[str, Mapping[str, Any]] = {"head": cluster["headGroupSpec"]}
        for group in cluster["workerGroupSpecs"]:
            self._pods |= {f"{group['groupName']}-{number}": group for number in range(group["replicas"])}
        self._first = tuple(self._pods)
        self._pods |= {name: self._pods[f"{name.partition('-')[0]}-0"] for name in spare}
        self._folder = Path(tempfile.mkdtemp(prefix="outr-", dir="/tmp"))  # the paths of Ray's sockets have 107 characters
        self.log = self._folder / "machines.log"  # output of all machines' processes
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
            parts.pop_all()
        self.model, self.model_name = model, model.name
        self.serve_config: dict[str, Any] = yaml.safe_load(spec["serveConfigV2"])
        (application,) = self.serve_config["applications"]
        application["args"]["redis_url"] = self.memory.url
        self.set({"model": {"path": str(model)}, "tenancy": {"keys_file": str(self.keys_file)}})
        self.set(settings)

    @property
    def urls(self) -> list[str]:
        """Addresses of the APIs' machines, which stand for the Service of the manifests."""
        machines = [machine for name, machine in self.machines.by_name.items() if name.startswith("api-")]
        return [f"http://{machine.address}:{self.serve_config['http_options']['port']}" for machine in machines]

    def machine(self, name: str) -> Machine:
        """Return the machine of a pod: ``head``, ``api-0``, ``engine-0``, ..."""
        return self.machines.by_name[name]

    def give_key(self, key: str) -> None:
        """Replace the tenant's key, as a changed secret does."""
        text = yaml.safe_dump({"tenants": {TENANT: {"keys": [hash_key(key)]}}, "admin_keys": [hash_key(self.admin_key)]})
        written = self.keys_file.with_suffix(".new")
        written.write_text(text, encoding="utf-8")
        written.replace(self.keys_file)

    def set(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Change settings by section; ``deploy`` applies them."""
        (application,) = self.serve_config["applications"]
        for section, values in settings.items():
            application["args"].setdefault(section, {}).update(values)

    def start(self, name: str) -> None:
        """Start Ray on a machine, as KubeRay starts a pod's."""
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
        """Return the environment of a pod's container."""
        found = os.environ | self._variables | {
            "HOME": str(self._folder), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
            "PYTHONPATH": str(ROOT), SECRET_VARIABLE: self._token, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token,
        }  # fmt: skip
        if name == "head":
            return found | {"RAY_REDIS_ADDRESS": self.state.address, "RAY_REDIS_CA_CERT": ""}  # Ray reads the file in any case
        return found | {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}  # KubeRay's value if the state outlives the head

    def deploy(self) -> None:
        """Hand the Serve configuration to the head and return when it is accepted.

        Raises:
            MachinesError: it is refused, or the head does not answer in time.
        """

        def check() -> str | None:
            answer = httpx.put(self._applications, json=self.serve_config, headers=self._bearer, timeout=30)
            return None if answer.is_success else f"{answer.status_code} {answer.text[:400]}"

        self._until(check, "the head does not accept the Serve configuration", _START_S)

    def applications(self) -> dict[str, Any]:
        """Return the head's report about the Serve applications, which KubeRay reads."""
        answer = httpx.get(self._applications, headers=self._bearer, timeout=30).raise_for_status()
        found: dict[str, Any] = answer.json()["applications"]
        return found

    def until_running(self, timeout_s: float = _START_S) -> float:
        """Wait until the head reports that the application runs, and return the seconds.

        Raises:
            MachinesError: it does not in time.
        """

        def check() -> str | None:
            status: str = self.applications()["outrider"]["status"]
            return None if status == "RUNNING" else status

        return self._until(check, "the application does not run", timeout_s)

    def until(self, path: str, says: Mapping[str, Any], timeout_s: float = _START_S) -> float:
        """Wait until a route of each API answers 200 with these values, and return the seconds.

        Example: ``until("/health", {"status": "ok", "replicas": 2})``.

        Raises:
            MachinesError: it does not in time.
        """

        def check() -> str | None:
            for url in self.urls:
                answer = httpx.get(f"{url}{path}", timeout=5)
                if answer.status_code != 200 or not says.items() <= answer.json().items():
                    return f"{answer.status_code} {answer.text[:300]}"
            return None

        return self._until(check, f"{path} does not say {dict(says)}", timeout_s)

    def _until(self, check: Callable[[], str | None], fault: str, timeout_s: float) -> float:
        """Poll until ``check`` returns None, and return the seconds; ``MachinesError`` with its last answer after the timeout."""
        began, last = time.monotonic(), "no answer"
        while time.monotonic() - began < timeout_s:
            try:
                found = check()
            except (httpx.HTTPError, KeyError, ValueError) as error:  # a head that has just started knows no application
                found = str(error)
            if found is None:
                return round(time.monotonic() - began, 2)
            last = found
            self._restart_ended()
            time.sleep(_POLL_S)
        raise MachinesError(f"{fault} within {timeout_s:.0f} s: {last}")

    def _restart_ended(self) -> None:
        """Restart Ray where it ended by itself, as the kubelet restarts a container."""
        for name, machine in self.machines.by_name.items():
            if machine.ended:
                output = self.log.read_text(errors="replace")[-500:]
                print(f"the Ray of {name} ended by itself and is started again: {output}", file=sys.stderr)
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and remove the machines. May be repeated."""
        self._parts.close()

    @property
    def _applications(self) -> str:
        return f"http://{self.machine('head').address}:{_DASHBOARD_PORT}/api/serve/applications/"

    @property
    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}
