"""An enterprise's day of requests: a function of its seed, with all kinds and their relations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from outrider.cluster.cli.generate.prompt_file import PromptFileError
from outrider.experiments.rag.traffic import (
    PAIRED,
    SHARES,
    TENANTS,
    Asked,
    make_day,
    make_pairs,
    read_items,
)

SEPARATOR = chr(0x2028)  # a line separator to some, a part of the text to JSON


def document(number: int) -> str:
    return f"The harbour of Meridian has {number} piers.{SEPARATOR} It was opened in {1800 + number}. {number} lines call there."


@pytest.fixture
def workloads(tmp_path: Path) -> Path:
    """Return a folder with single questions, conversations, summaries, and code, which is none of these."""
    single = [
        {"id": f"s/{n}", "prompt": f"Passage: {document(n)}\n\nQuestion: how many piers has harbour {n}\nAnswer:", "output": "o"}
        | {"ref_kind": "doc", "references": [document(n)]}
        for n in range(60)
    ]
    turns = [{"role": "user", "content": "Who opened it?"}, {"role": "assistant", "content": "They."}]
    turns += [{"role": "user", "content": "And when?"}]
    talks = [
        {"id": f"t/{n}t{len(some)}", "session": f"t/{n}", "turns": some, "prompt": "x", "output": "It says so."}
        | {"ref_kind": "doc", "references": [document(100 + n)], "alt_outputs": {"b": "So it says, and more."}}
        for n in range(20)
        for some in (turns[:1], turns)
    ]
    more = [
        {"id": "m/1", "prompt": f"Summarize: {document(500)}", "output": "o", "ref_kind": "doc", "references": [document(500)]},
        {"id": "m/2", "prompt": "Fix bugs in f.", "output": "o", "ref_kind": "doc", "references": ["def f(): pass"]},
        {"id": "m/3", "prompt": "Say something.", "output": "o", "ref_kind": None, "references": []},
    ]
    for name, records in (("single", single), ("talks", talks), ("more", more)):
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


def test_items_are_what_is_asked_about_documents(workloads: Path) -> None:
    items = read_items(workloads)
    assert len(items) == 60 + 20 + 1
    summary, single, talk = items[:3]
    assert (summary.documents[0], summary.questions) == (document(500), ())
    assert single.questions == ("how many piers has harbour 0",) and single.documents[:2] == (document(0), document(1))
    assert talk.questions == ("Who opened it?", "And when?") and talk.wordings == ("It says so.", "So it says, and more.")
    assert all(sum(map(len, item.documents)) <= 5000 for item in items)


def test_a_day_is_a_function_of_its_seed(workloads: Path) -> None:
    items = read_items(workloads)
    day = make_day(items, 60, 3)
    assert day == make_day(items, 60, 3) != make_day(items, 60, 4)
    assert [one.at for one in day] == sorted(one.at for one in day) and day[0].at >= 0 and day[-1].at < 1
    assert len({one.key for one in day}) == 60
    with pytest.raises(PromptFileError, match="lower --requests"):
        make_day(items, 3000, 3)


def test_kinds_tenants_and_hours_have_their_shares(workloads: Path) -> None:
    items = read_items(workloads)
    many = [one for seed in range(40) for one in make_day(items, 50, seed)]
    kinds, tenants = Counter(one.kind for one in many), Counter(one.tenant for one in many)
    assert sum(SHARES.values()) == pytest.approx(1) == sum(TENANTS.values())
    for kind, share in SHARES.items():  # a day begins with what is new: nothing came before
        assert kinds[kind] / len(many) == pytest.approx(share, abs=0.03 if kind != "new" else 0.15), kind
    assert [name for name, _ in tenants.most_common()] == list(TENANTS)
    night = sum(one.at < 0.25 for one in many) / len(many)
    noon = sum(0.35 <= one.at < 0.6 for one in many) / len(many)
    assert night < 0.15 < 0.4 < noon


def test_requests_are_akin_as_they_say(workloads: Path) -> None:
    items = read_items(workloads)
    for seed in range(10):
        before: list[Asked] = []
        for one in make_day(items, 60, seed):
            own = [each for each in before if each.tenant == one.tenant]
            if one.kind in ("new", "report"):
                assert one.item not in {each.item for each in own}
            elif one.kind == "identical":
                assert any((each.documents, each.questions) == (one.documents, one.questions) for each in own)
            elif one.kind in ("near_duplicate", "same_documents"):
                asked = {each.questions[-1] for each in own if each.documents == one.documents and each.kind != "near_duplicate"}
                assert asked and one.questions[-1] not in asked
            elif one.kind == "conversation":
                (last,) = (each for each in own if each.key == one.earlier[-1])
                assert one.questions[:-1] == last.questions and one.earlier[:-1] == last.earlier
            elif one.kind == "other_tenant":
                assert one.item not in {each.item for each in own} and one.item in {each.item for each in before}
            before.append(one)


def test_pairs_are_of_all_kinds_in_turns_and_each_of_its_own_documents(workloads: Path) -> None:
    items = read_items(workloads)
    pairs = make_pairs(items, 3, 0)
    assert [second.kind for _, second in pairs] == [*PAIRED] * 3 and pairs == make_pairs(items, 3, 0)
    assert len({first.item for first, _ in pairs}) == 15 and all(first.documents == second.documents for first, second in pairs)
    with pytest.raises(PromptFileError, match="lower --pairs"):
        make_pairs(items, 17, 0)
