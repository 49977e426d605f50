"""API keys: when a server needs them, and the file with keys and limits of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.configs.keys_file import with_keys_file, with_tenants_of_file
from outrider.configs.schema import ConfigError, load_config, tenant_names
from outrider.configs.slices import TenancyOptions, TenantOptions
from outrider.configs.tenancy_checks import key_is_required

FIRST, SECOND, THIRD = (f"sha256:{digits * 32}" for digits in ("0a", "0b", "0c"))
KEYED = f"tenancy.tenants.acme.keys=[{FIRST}]"


def write(tmp_path: Path, text: str) -> TenancyOptions:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return TenancyOptions(tenants={"acme": TenantOptions(keys=(FIRST,), cache_mib=8.0)}, keys_file=str(path))


@pytest.mark.parametrize(
    ("overrides", "required"),
    [
        ([], False),
        (["server.host=0.0.0.0", KEYED], True),
        (["server.host=10.0.0.1", "tenancy.keys_file=keys.yaml"], True),
        (["server.host=0.0.0.0", "server.require_key=false"], False),
        (["server.require_key=true", KEYED], True),
        ([KEYED], False),
    ],
)
def test_a_key_is_required_unless_only_this_machine_reaches_the_server(overrides: list[str], required: bool) -> None:
    server = load_config(None, overrides).server
    assert key_is_required(server.require_key, server.host) is required


def test_the_file_and_the_section_add_up(tmp_path: Path) -> None:
    section = write(
        tmp_path,
        f"tenants:\n  acme:\n    keys: ['{SECOND}', '{FIRST}']\n    max_concurrent: 3\n"
        f"  umbrella:\n    keys: ['{THIRD}']\n    cache_mib: 2\nadmin_keys: ['{FIRST}']\n",
    )
    whole = with_keys_file(section, required=True)
    assert whole.tenants["acme"] == TenantOptions(keys=(FIRST, SECOND), cache_mib=8.0, max_concurrent=3)
    assert whole.tenants["umbrella"] == TenantOptions(keys=(THIRD,), cache_mib=2.0)
    assert whole.admin_keys == (FIRST,)

    start = with_tenants_of_file(section)
    assert start.tenants == {"acme": section.tenants["acme"], "umbrella": TenantOptions(cache_mib=2.0)}
    assert start.admin_keys == ()
    assert tenant_names(load_config().model_copy(update={"tenancy": start})) == ("acme", "umbrella")
    assert with_keys_file(start) == whole


def test_a_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(None, ["tenancy.keys_file=keys.yaml"]).tenancy.keys_file == str(tmp_path / "keys.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants:\n  umbrella:\n    keys: [outrider-abc]\n", "tenancy.tenants.umbrella.keys.0 is not a hash of a key"),
        ("tenants:\n  umbrella:\n    keys: outrider-abc\n", "tenants.umbrella.keys is not a hash of a key"),
        ("admin_keys: [outrider-abc]\n", "tenancy.admin_keys.0 is not a hash of a key"),
        (f"tenants:\n  umbrella:\n    keys: ['{FIRST}']\n", "acme and umbrella have the same key"),
        ("tenants:\n  umbrella:\n    max_concurrent: outrider-abc\n", "tenants.umbrella.max_concurrent has a value that is not"),
        ("tenants:\n  umbrella:\n    max_concurrent: 0\n", "max_concurrent is 0; allowed: 1 to"),
        ("tenant: {}\n", "unknown key tenant"),
        ("tenants:\n  a/b: {}\n", "'a/b' cannot name a tenant"),
        ("outrider-abc\n", "must hold tenants, admin_keys, or both"),
        ("tenants:\n  acme: outrider-abc: x\n", "is not yaml, see line 2"),
        ("", "must hold tenants"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_and_not_shown(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_keys_file(write(tmp_path, text))
    assert said in str(caught.value) and "keys.yaml" in str(caught.value)
    assert "outrider-abc" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_empty_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        with_keys_file(TenancyOptions(keys_file=str(tmp_path / "nowhere.yaml")))
    path = tmp_path / "keys.yaml"
    path.write_text("tenants:\nadmin_keys: []\n")
    without = TenancyOptions(keys_file=str(path))
    assert with_keys_file(without) == without
    with pytest.raises(ConfigError, match=r"no tenant has one: outrider new-key"):
        with_keys_file(without, required=True)
