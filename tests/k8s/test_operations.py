"""Alerts, overlays and keys of the configuration that the operators' pages name exist; ``test_floors`` reads the rest."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from configs.schema import keys

ROOT = Path(__file__).resolve().parents[2]
INSTALL, RUNBOOK, UPGRADE = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("install.md", "runbook.md", "upgrade.md")
)


def test_every_alarm_has_a_line_and_no_other_has() -> None:
    rules = yaml.safe_load((ROOT / "k8s" / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))["spec"]["groups"]
    alarms = [rule["alert"] for group in rules for rule in group["rules"]]
    assert re.findall(r"^\| (Outrider\w+) \|", RUNBOOK, re.MULTILINE) == alarms


def test_every_overlay_is_told() -> None:
    told = re.findall(r"^\| `([\w-]+)` \|", INSTALL.split("| overlay |")[1].split("\n\n")[0], re.MULTILINE)
    assert sorted(told) == sorted(folder.name for folder in (ROOT / "k8s" / "overlays").iterdir())


def test_keys_of_the_configuration_are_known() -> None:
    known = {*keys(), "tenancy.tenants"}  # which only a file can set
    sections = {key.partition(".")[0] for key in known}
    for name in re.findall(r"`(\w+\.\w+)(?:=[^`]*|: [^`]*)?`", INSTALL + RUNBOOK + UPGRADE):
        if name.partition(".")[0] in sections:
            assert name in known, name
