"""What ``docs/operations.md`` names is there: alarms, overlays, files, modules, headings, keys of the configuration."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import yaml

from configs.schema import keys

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "operations.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_every_alarm_has_a_line_and_no_other_has() -> None:
    rules = yaml.safe_load((ROOT / "k8s" / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))["spec"]["groups"]
    alarms = [rule["alert"] for group in rules for rule in group["rules"]]
    assert re.findall(r"^\| (Outrider\w+) \|", TEXT, re.MULTILINE) == alarms


def test_every_overlay_is_told() -> None:
    told = re.findall(r"^\| `([\w-]+)` \|", TEXT.split("| overlay |")[1].split("\n\n")[0], re.MULTILINE)
    assert sorted(told) == sorted(folder.name for folder in (ROOT / "k8s" / "overlays").iterdir())


def test_files_and_modules_are_there() -> None:
    for path in re.findall(r"\bk8s/[\w/.-]+\w", TEXT):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ([\w.]+)", TEXT):
        assert importlib.util.find_spec(module), module


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.+)", TEXT, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert (DOCUMENT.parent / target.partition("#")[0]).exists(), target


def test_keys_of_the_configuration_are_known() -> None:
    known = {*keys(), "tenancy.tenants"}  # which only a file can set
    sections = {key.partition(".")[0] for key in known}
    for name in re.findall(r"`(\w+\.\w+)(?:=[^`]*|: [^`]*)?`", TEXT):
        if name.partition(".")[0] in sections:
            assert name in known, name
