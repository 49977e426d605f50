"""lm-eval-harness against a server, with drafts and without, one request and 32 at a time: the same scores and answers.

python lm_eval_scores.py URL MODEL WORKLOADS RECORDS. Runs where ``lm_eval[api]`` is installed. The tasks beside this file ask
RECORDS records of each workload in the folder WORKLOADS, and take what is computed from an answer from here.
"""

import contextlib
import doctest
import io
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

TASKS = ("gsm8k_workload", "humaneval_workload", "gsm8k_likelihood")
SPECULATION = {"drafts": {}, "plain": {"max_draft_tokens": 0}}
AT_ONCE = (1, 32)
CODE_S = 10.0  # for the examples of a function
DRAFTED = re.compile(r"^vllm:spec_decode_num_draft_tokens_total\S* (\S+)$", re.MULTILINE)


def last_number(doc, results):
    """Compare the last number of an answer with the right one, and its characters with a human's answer."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", results[0].replace(",", "")) or [""]
    right = doc["output"].split("#### ")[-1].replace(",", "")
    return {"exact_match": float(numbers[-1] == right), "chrf": (doc["output"], results[0])}


def examples_hold(doc, results):
    """Run the examples of a function's docstring, and compare the function's characters with a human's."""
    process = multiprocessing.Process(target=_run_examples, args=(doc["prompt"] + results[0],))
    process.start()
    process.join(CODE_S)
    if process.is_alive():
        process.kill()
    process.join()
    return {"pass_at_1": float(process.exitcode == 0), "chrf": (doc["output"], results[0])}


def _run_examples(code):
    """End this process with 0 if the code has examples and all hold."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
        test = doctest.DocTestParser().get_doctest(code, names, "answer", None, 0)
        found = doctest.DocTestRunner(verbose=False).run(test)
    sys.exit(0 if found.attempted and not found.failed else 1)


def drafted(url):
    """Return the number of draft tokens so far."""
    time.sleep(2)  # /metrics is a second old
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return sum(float(value) for value in DRAFTED.findall(answer.read().decode()))


def main():
    """Prints the scores of each run; ends with an error where a score or an answer differs."""
    url, model, workloads, records = sys.argv[1:]
    asked = f"model={model},base_url={url}/v1/completions,timeout=1800"
    runs, answers = {}, {}
    for at_once in AT_ONCE:
        for name, speculation in SPECULATION.items():
            before, began = drafted(url), time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    "lm_eval", "run", "--model", "local-completions", "--model_args", f"{asked},num_concurrent={at_once}",
                    "--include_path", Path(__file__).resolve().parent, "--tasks", ",".join(TASKS), "--limit", records,
                    "--gen_kwargs", json.dumps({"speculation": speculation}), "--log_samples", "--output_path", folder,
                ]  # fmt: skip
                done = subprocess.run(
                    [Path(sys.executable).parent / command[0], *command[1:]], cwd=workloads, capture_output=True, text=True
                )
                assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
                (results,) = Path(folder).rglob("results_*.json")
                scores = json.loads(results.read_text())["results"]
                samples = [json.loads(line) for file in sorted(Path(folder).rglob("samples_*")) for line in file.open()]
            run = f"{name}, {at_once} at a time"
            runs[run] = {
                f"{task} {metric.removesuffix(',none')}": value
                for task in TASKS
                for metric, value in scores[task].items()
                if metric.endswith(",none") and "stderr" not in metric
            }
            answers[run] = [(sample["doc_id"], sample["resps"]) for sample in samples]
            print(f"{run}: {runs[run]}, {drafted(url) - before:.0f} draft tokens, {time.monotonic() - began:.0f} s", flush=True)
    first = next(iter(runs))
    differing = [run for run in runs if (runs[run], answers[run]) != (runs[first], answers[first])]
    print(f"{len(answers[first])} answers of each run; other scores or answers than in the first: {differing or 'none'}")
    assert not differing


if __name__ == "__main__":
    main()
