"""Exactness of groups of ranks whose requests ask for strategies and bounds of their own. ``test_concurrency.py`` has it for one
replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from decoding.drafters import STRATEGIES, build_drafter, build_drafters
from decoding.request import PLAIN, Request, SamplingParams
from tests.models import engine_over, prepared, tiny_model
from tests.ranks import TinyGroup

PROMPTS = ([7], [1, 2, 3, 4] * 6 + [1, 2], [5] * 40, [3, 1, 4, 1, 5, 9, 2, 6] * 3)
CHOICES = (None, *sorted(STRATEGIES))
BOUNDS = (None, 3, 100)


def requests(answers: Sequence[Sequence[int]] = ()) -> list[Request]:
    """Every strategy twice, greedy and sampled; answers are references that can be copied."""
    made = []
    for at, strategy in enumerate(CHOICES * 2):
        prompt, hot = PROMPTS[at % len(PROMPTS)], 0.9 if at % 2 else 0.0
        params = SamplingParams(16, temperature=hot, seed=at, logprobs=1 if at % 5 == 0 else None, ignore_eos=True)
        bound, tenant = BOUNDS[at % len(BOUNDS)], ("a", "b", None)[at % 3]
        made.append(
            Request(str(at), prompt, params, answers[at : at + 1], tenant=tenant, strategy=strategy, max_draft_tokens=bound)
        )
    return made


def test_a_group_says_what_plain_decoding_says() -> None:
    world, model = 3, tiny_model("llama", "float32")
    alone = engine_over(model.runner, build_drafter(PLAIN, {}), 1)
    expected = []
    for one in requests():
        plain = Request(one.request_id, one.prompt_ids, one.params)
        alone.add(plain)
        while alone.has_work:
            alone.step()
        expected.append(plain.output_ids.tolist())
    drafter = prepared(build_drafters("auto", {"all_rows": True}, sorted(STRATEGIES)), model)
    with TinyGroup("llama", drafter, world, strategy="auto") as ranks:
        asked = requests(expected)
        assert ranks.run(asked) == expected
        assert ranks.state.losses == ranks.state.disagreements == ranks.state.divergences == 0
        ranks.engine.check_integrity()
    accepted: Counter[str | None] = Counter()
    for one in asked:
        accepted[one.strategy] += one.stats.accepted
    assert all(accepted[name] > 0 for name in (None, "auto", "llma", "suffix", "trie")), accepted
    assert sum(one.stats.drafted for one in asked if one.strategy == PLAIN) == 0
    for one in asked:
        assert one.max_draft_tokens != 3 or one.stats.drafted <= 3 * world * one.stats.steps, one.request_id
