"""The CPU overlay's RayService on machines of their own: one is lost while requests run, and traffic goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
import yaml

from outrider.configs.schema import REPOSITORY
from outrider.experiments.faults.machines import why_not
from outrider.experiments.faults.manifest_cluster import RENDERED, TENANT, ManifestCluster
from outrider.experiments.faults.nodes import OVERLAY, Fault, ask_all, bearer, lose_api, lose_engine, lose_head, rotate, under
from outrider.experiments.service.asks import make_asks

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
REPLACED = {("model", "path"), ("tenancy", "keys_file")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ManifestCluster]:
    with ManifestCluster(OVERLAY, REPOSITORY / "demo_model", {"model": {"dtype": "float32"}}) as started:
        yield started


def test_it_is_the_overlay_that_is_served(cluster: ManifestCluster) -> None:
    documents = yaml.safe_load_all((RENDERED / f"{OVERLAY}.yaml").read_text(encoding="utf-8"))
    spec = next(each["spec"] for each in documents if each["kind"] == "RayService")
    shown = yaml.safe_load(spec["serveConfigV2"])
    (theirs,), (ours,) = shown["applications"], cluster.serve_config["applications"]
    for section, name in REPLACED:
        ours["args"][section][name] = theirs["args"][section][name]
    assert ours | {"args": ours["args"] | {"redis_url": theirs["args"]["redis_url"]}} == theirs | {
        "args": theirs["args"] | {"model": theirs["args"]["model"] | {"dtype": "float32"}}
    }
    assert shown["http_options"] == cluster.serve_config["http_options"]


def test_what_holds_no_model_is_on_the_api_s_machine(cluster: ManifestCluster) -> None:
    deployments = cluster.applications()["outrider"]["deployments"]
    where = {name: {replica["node_ip"] for replica in told["replicas"]} for name, told in deployments.items()}
    apis = {cluster.machine(name).address for name in ("api-0", "api-1")}
    assert where["api"] == apis and where["cache"] <= apis
    assert where["engine"] == {cluster.machine("engine-0").address, cluster.machine("engine-1").address}


def test_keys_are_required_and_the_operator_s_routes_are_apart(cluster: ManifestCluster) -> None:
    told = []
    for url in cluster.urls:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=bearer(cluster.key)).status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 404
        told.append(httpx.get(url.replace(":8000", ":8001") + "/metrics").raise_for_status().text)
    assert all("outrider:door_requests_in_flight" in metrics for metrics in told)
    of_engines = [metrics for metrics in told if "outrider:replicas" in metrics]  # of several APIs one tells of the engines
    assert len(of_engines) == 1
    assert "outrider:replicas 2.0" in of_engines[0] and "outrider:cache_connected" in of_engines[0]


@pytest.mark.parametrize("fault", [lose_api, lose_head, lose_engine])
def test_a_lost_machine_changes_no_answer(cluster: ManifestCluster, fault: Fault) -> None:
    asks = make_asks(8, 80, seed=1)
    right, _ = asyncio.run(ask_all(cluster, asks, 4))
    assert not [told.error for told in right if told.error]
    told = asyncio.run(under(cluster, fault, asks, [right], 4))
    assert told["wrong"] == [] and told["answers"] >= len(asks), told


def test_keys_change_without_a_restart(cluster: ManifestCluster) -> None:
    assert set(rotate(cluster)) == {"new_key_works_s", "old_key_refused_s"}


def test_all_apis_forget_what_one_is_told_to_delete(cluster: ManifestCluster) -> None:
    body = {"model": cluster.model_name, "prompt": "The library opens", "max_tokens": 8, "temperature": 0}
    admins = [url.replace(":8000", ":8001") for url in cluster.urls]
    operator = bearer(cluster.admin_key)

    def kept() -> list[int]:
        return [httpx.get(f"{url}/admin/audit", headers=operator).raise_for_status().json()["kept"] for url in admins]

    for url in cluster.urls:
        httpx.post(f"{url}/v1/completions", json=body, headers=bearer(cluster.key), timeout=60).raise_for_status()
    assert all(kept())
    httpx.delete(f"{admins[0]}/admin/cache/tenants/{TENANT}", headers=operator, timeout=60).raise_for_status()
    assert kept() == [0, 0]
