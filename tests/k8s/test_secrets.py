"""``k8s/secrets.sh``, run: it makes what the manifests name, and every part of it works."""

from __future__ import annotations

import hashlib
import re
import shutil
import ssl
import subprocess
import sysconfig
from pathlib import Path

import kubernetes_validate
import pytest

from outrider.cache_service.namespace import hash_key
from outrider.configs.keys_file import with_keys_file
from outrider.configs.slices import TenancyOptions
from tests.helpers.redis_user import ACL_COMMANDS, acl_rule
from tests.k8s.made_secrets import SCRIPT, Made, make_certificate, make_secrets, run_script
from tests.k8s.manifests import K8S, NAMESPACE, REPOSITORY, SECRETS

SERVICES = ("outrider-redis", "outrider-gcs-redis")
CLEAR_KEY = re.compile(r"key(?: of tenant \S+)?: (outrider-[A-Za-z0-9_-]{43})$", re.MULTILINE)


@pytest.fixture(scope="module")
def made() -> Made:
    return make_secrets()


def test_the_secrets_are_those_of_the_manifests(made: Made) -> None:
    assert {name: set(keys) for name, keys in made.values.items()} == SECRETS
    for document in made.documents:
        kubernetes_validate.validate(document, "1.33", strict=True)
        assert (document["kind"], document["type"], document["metadata"]["namespace"]) == ("Secret", "Opaque", NAMESPACE)
        assert all(isinstance(value, str) and value.strip() == value for value in document["stringData"].values())


def test_every_run_makes_all_of_it_anew(made: Made) -> None:
    other = make_secrets()
    for name, keys in made.values.items():
        for key, value in keys.items():
            assert value != other.values[name][key], (name, key)
    random = [made.values["outrider-cache"][key] for key in SECRETS["outrider-cache"]]
    random += [made.values["outrider-gcs-redis"]["password"], made.values["outrider-ray-token"]["auth_token"]]
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in random) and len(set(random)) == 4


@pytest.mark.parametrize("tenant", [None, "acme", "8", "a_b.c-D", "no"])
def test_the_printed_keys_open_what_the_file_of_keys_says(tenant: str | None, tmp_path: Path) -> None:
    made = make_secrets(*([] if tenant is None else ["--tenant", tenant]))
    made.write("outrider-keys", tmp_path)
    section = with_keys_file(TenancyOptions(keys_file=str(tmp_path / "keys.yaml")), required=True)
    of_tenant, of_admin = CLEAR_KEY.findall(made.said)
    (name,) = section.tenants
    assert name == (tenant or "default") and f"tenant {name}: {of_tenant}" in made.said
    assert section.tenants[name].keys == (hash_key(of_tenant),)
    assert section.admin_keys == (hash_key(of_admin),)
    assert of_tenant not in made.stdout and of_admin not in made.stdout


def test_the_rights_are_the_documented_ones(made: Made) -> None:
    users = {line.split()[1]: line.split()[2:] for line in made.values["outrider-redis-acl"]["users.acl"].splitlines()}
    assert users["default"] == ["off", "resetkeys", "resetchannels", "-@all"]
    assert users["probe"] == ["on", ">probe", "resetkeys", "resetchannels", "-@all", "+ping"]
    password = made.values["outrider-cache"]["OUTRIDER_REDIS_PASSWORD"]
    assert users["outrider"][:2] == ["on", f"#{hashlib.sha256(password.encode()).hexdigest()}"]
    only_elsewhere = {"+select", "+command", "+cluster|slots"}  # behind Sentinel and Cluster, and in other databases
    assert users["outrider"][2:] == [word for word in acl_rule("outrider").split() if word not in only_elsewhere]
    assert only_elsewhere < set(ACL_COMMANDS) and users.keys() == {"default", "probe", "outrider"}
    readme = re.search(r"ACL SETUSER outrider on >PASSWORD ([^`]*)```", (REPOSITORY / "docs" / "sharing.md").read_text())
    assert readme is not None and readme[1].split() == users["outrider"][2:]


def openssl(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("service", SERVICES)
def test_the_chain_of_certificates(made: Made, tmp_path: Path, service: str) -> None:
    made.write(f"{service}-tls", tmp_path)
    authority, certificate = tmp_path / "ca.crt", tmp_path / "tls.crt"
    check = ("verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", authority)
    for host in (service, f"{service}.outrider", f"{service}.outrider.svc", "localhost"):
        told = openssl(*check, "-verify_hostname", host, certificate)
        assert told.returncode == 0, (host, told.stderr)
    (other,) = {*SERVICES} - {service}
    for host in (other, "redis", f"{service}.other.svc"):
        assert openssl(*check, "-verify_hostname", host, certificate).returncode != 0, host
    assert openssl("verify", certificate).returncode != 0  # nobody else vouches for it
    make_secrets().write("outrider-redis-tls", tmp_path / "other")
    made.write("outrider-ray-tls", tmp_path / "ray")
    for stranger in ("other", "ray"):
        assert openssl("verify", "-CAfile", tmp_path / stranger / "ca.crt", certificate).returncode != 0
    # The key of either Redis, and that of the pods' authority; that of the authority of Redis is in no Secret.
    assert made.stdout.count("BEGIN EC PRIVATE KEY") == made.stdout.count("PRIVATE KEY") / 2 == 3


def test_a_pod_s_certificate(made: Made, tmp_path: Path) -> None:
    """As the init container of ``k8s/components/tls`` makes it; for servers and clients, since both sides show theirs."""
    made.write("outrider-ray-tls", tmp_path / "authority")
    folder = make_certificate(tmp_path / "authority", tmp_path / "pod", "10.1.2.3", "head.outrider.svc.cluster.local")
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(
        ("ca.crt", "tls.crt", "tls.key"), 0o600
    )
    for purpose in ("sslserver", "sslclient"):
        check = ("verify", "-x509_strict", "-purpose", purpose, "-CAfile", tmp_path / "authority" / "ca.crt")
        for kind, name, expected in (
            ("-verify_ip", "10.1.2.3", True), ("-verify_ip", "127.0.0.1", True), ("-verify_ip", "10.1.2.4", False),
            ("-verify_hostname", "localhost", True), ("-verify_hostname", "head.outrider.svc.cluster.local", True),
            ("-verify_hostname", "other.outrider.svc.cluster.local", False),
        ):  # fmt: skip
            assert (openssl(*check, kind, name, folder / "tls.crt").returncode == 0) is expected, name
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "tls.crt", folder / "tls.key")
    other = make_certificate(tmp_path / "authority", tmp_path / "other", "10.1.2.4")
    assert (other / "tls.key").read_text() != (folder / "tls.key").read_text()
    assert openssl(*check, "-verify_hostname", "head.outrider.svc.cluster.local", other / "tls.crt").returncode != 0


@pytest.mark.parametrize(("options", "days"), [([], 825), (["--days", "2"], 2), (["--days=40"], 40)])
def test_days_of_the_certificates(options: list[str], days: int, tmp_path: Path) -> None:
    made = make_secrets(*options)
    made.write("outrider-redis-tls", tmp_path)
    for name in ("tls.crt", "ca.crt"):
        for late, expected in ((-600, True), (1, False)):
            told = openssl("x509", "-in", tmp_path / name, "-noout", "-checkend", str(days * 86400 + late))
            assert (told.returncode == 0) is expected, name
    ends = openssl("x509", "-in", tmp_path / "tls.crt", "-noout", "-enddate").stdout.partition("=")[2].strip()
    assert ends in made.said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--bogus"], "--bogus"),
        (["acme"], "acme"),
        (["--tenant"], "--tenant"),
        (["--tenant", ""], "--tenant ''"),
        (["--tenant", "a b"], "--tenant 'a b'"),
        (["--tenant=.."], "--tenant '..'"),
        (["--tenant", 'a": {}\nb'], "--tenant"),
        (["--tenant", "a" * 65], "--tenant"),
        (["--days", "0"], "--days '0'"),
        (["--days=1y"], "--days '1y'"),
    ],
)
def test_bad_options_are_refused(options: list[str], says: str) -> None:
    told = run_script(*options)
    assert (told.returncode, told.stdout) == (2, "") and says in told.stderr


def test_without_openssl(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    told = subprocess.run([bash, str(SCRIPT)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr.startswith("secrets: openssl not found: install it")


@pytest.mark.parametrize("verb", ["rand -base64", "rand -hex", "dgst", "ecparam", "req", "x509"])
def test_nothing_is_printed_when_openssl_fails(tmp_path: Path, verb: str) -> None:
    """An empty password would be worse than none."""
    fake, real = tmp_path / "bin" / "openssl", shutil.which("openssl")
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\ncase "$*" in "{verb}"*) echo no >&2; exit 1 ;; esac\nexec {real} "$@"\n')
    fake.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    told = run_script(env={"PATH": f"{fake.parent}:/usr/bin:/bin", "TMPDIR": str(temporary)})
    assert (told.returncode != 0, told.stdout) == (True, "")
    assert "no" in told.stderr and "API key" not in told.stderr
    assert list(temporary.iterdir()) == []  # nothing is left on the disk
    assert run_script(env={"PATH": "/usr/bin:/bin", "TMPDIR": str(temporary)}).returncode == 0
    assert list(temporary.iterdir()) == []


def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [*K8S.rglob("*.sh"), REPOSITORY / ".ci" / "run"]
    assert SCRIPT in scripts
    program = Path(sysconfig.get_path("scripts")) / "shellcheck"
    told = subprocess.run([program, *scripts], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")
