"""vLLM's answers to token ids: a JSON job on stdin, a JSON object of token ids on stdout. Runs where vLLM is installed."""

import json
import os
import sys


def main() -> None:
    """One engine, all prompts."""
    job = json.load(sys.stdin)
    out, sys.stdout = os.dup(1), sys.stderr
    os.dup2(2, 1)  # what vLLM prints is not an answer
    from vllm import LLM, SamplingParams

    more = {}
    if job["drafts"]:
        more["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4
        }  # fmt: skip
    engine = LLM(
        model=job["model"], dtype=job["dtype"], max_model_len=job["context"], max_num_seqs=job["running"],
        enable_prefix_caching=False, enforce_eager=True, seed=0, **more,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"].values()]
    given = engine.generate(prompts, params, use_tqdm=False)
    answers = {key: list(one.outputs[0].token_ids) for key, one in zip(job["prompts"], given, strict=True)}
    with os.fdopen(out, "w") as stream:
        print(json.dumps(answers), file=stream, flush=True)


if __name__ == "__main__":
    main()
