"""vLLM in a process with the protocol of ``experiments/peers/worker.py``, run by a Python that has vLLM.

The setting has two more entries: ``drafts`` (``speculative_config``, or null) and ``eager``. The only mode is ``vllm``.
"""

import json
import os
import sys
import time


def forget(worker):
    """Clear the suffix trees of earlier requests, in the process that drafts."""
    cache = getattr(getattr(worker.model_runner, "drafter", None), "suffix_cache", None)
    if cache is not None:
        worker.model_runner.drafter.suffix_cache = type(cache)(cache.max_tree_depth, cache.max_cached_requests)


def run(engine, job, ends, params_of):
    """Return the answer to a job."""
    params = params_of(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, stop_token_ids=ends)
    waiting, order = list(job["asks"]), [key for key, _, _ in job["asks"]]
    sent, first, last, tokens, live = {}, {}, {}, {}, 0
    began = time.perf_counter()
    while waiting or live:
        while waiting and live < job["running"]:
            key, ids, _ = waiting.pop(0)
            sent[key] = time.perf_counter()
            engine.add_request(key, {"prompt_token_ids": ids}, params)
            live += 1
        for output in engine.step():
            now, ids = time.perf_counter(), output.outputs[0].token_ids
            if ids and output.request_id not in first:
                first[output.request_id] = now
            last[output.request_id] = now
            if output.finished:
                tokens[output.request_id] = list(ids)
                live -= 1
    return {
        "tokens": [tokens[key] for key in order],
        "first_s": [first[key] - sent[key] for key in order],
        "last_s": [last[key] - sent[key] for key in order],
        "wall_s": max(last.values()) - began,
    }


def main():
    """Answer until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    setting = json.loads(sys.stdin.readline())
    import vllm

    more = {"speculative_config": setting["drafts"]} if setting["drafts"] else {}
    llm = vllm.LLM(
        model=setting["model"], dtype=setting["dtype"], max_model_len=setting["context"], max_num_seqs=setting["running"],
        enable_prefix_caching=False, enforce_eager=setting["eager"], seed=0, **more,
    )  # fmt: skip
    print(json.dumps({"ready": True, "version": vllm.__version__}), file=out, flush=True)
    suffix, seen = bool(setting["drafts"]) and setting["drafts"]["method"] == "suffix", None
    for line in sys.stdin:
        job = json.loads(line)
        if suffix and job["fresh"] != seen:
            llm.collective_rpc(forget)
            seen = job["fresh"]
        print(json.dumps(run(llm.llm_engine, job, setting["ends"], vllm.SamplingParams)), file=out, flush=True)


if __name__ == "__main__":
    main()
