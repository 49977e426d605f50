"""How often rounding decides a token, and whether a guard could take that back.

    python -m experiments.near_ties --dtype bfloat16 --prompts ../shared/workloads/open/llma_rag.jsonl --records 4

Along known texts, the logits of each position are computed in three ways: (a) one row at a time, plain decoding; (b) in trees of
several rows, the right tokens in a chain among random siblings, and the next tree sees the KV of this one, as in an engine;
(c) one row at a time over the KV of (b): what a guard sees that decides near-ties again in the shape of plain decoding.

A flip is a position whose argmax in (b) or (c) is not that of (a). The gap of a position is how far the best logit is above the
second. Its change is that of the best in (a) above its rival, the best in (b) where that is another, else the second in (a): two
logits that are 0.3 apart in (a) and -0.1 in (b) changed by 0.4. The largest change is the noise. A guard that computes each token
again whose gap in (b) is no larger takes back every flip, if only (c) says the same as (a); ``left`` counts where it does not.
The noise is that of the same texts, so that a guard which has to know it beforehand is at best as good.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from configs.slices import Dtype, ModelOptions
from decoding.tree import DraftTree, Int32Array
from engine.batch import Line, LineWork, pack
from engine.loading import LoadedModel, load_model
from engine.runner import ModelRunner

Text = tuple[Sequence[int], Sequence[int]]  # prompt, and what follows it
FloatArray = npt.NDArray[np.float64]

TOP = 8  # of (a): the tokens of a position whose logits are compared
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
_CHUNK = 512  # rows of a prefill
_SLOT = 0


def _compute(runner: ModelRunner, tokens: Int32Array, start: int, tree: DraftTree | None = None) -> torch.Tensor:
    """One forward of the tokens behind ``start``; with a tree below the last of them the logits [rows, vocab] of its rows."""
    return runner.forward(pack([LineWork(Line(_SLOT, tokens), start, len(tokens), tree)])).clone()  # the next may overwrite it


def _prefill(runner: ModelRunner, tokens: Int32Array) -> None:
    """All but the last token, whose row is the first of which logits are wanted."""
    for start in range(0, len(tokens) - 1, _CHUNK):
        _compute(runner, tokens[: min(start + _CHUNK, len(tokens) - 1)], start)


class Walk:
    """The forwards along one text, in one slot, behind its prompt."""

    def __init__(self, runner: ModelRunner, text: Text, most_rows: int) -> None:
        """Computes the prompt in the shape that all ways share.

        Args:
            runner: with one slot or more, which holds nothing of worth.
            text: a prompt of one token or more, and what follows.
            most_rows: of a tree.

        Raises:
            ValueError: the prompt is empty, nothing follows it, or the slot is too short.
        """
        prompt, output = text
        if not prompt or not output:
            raise ValueError(f"a text needs a prompt and an output, got {len(prompt)} and {len(output)} tokens")
        need = len(prompt) + len(output) - 1 + most_rows
        if need > runner.cache.capacity:
            raise ValueError(f"a text needs {need} entries with trees of {most_rows} rows, a slot has {runner.cache.capacity}")
        self._runner, self._tokens = runner, np.array([*prompt, *output[:-1]], np.int32)
        self._rows = range(len(prompt) - 1, len(self._tokens))  # each says what follows it
        self._vocab = runner.model.config.get_text_config().vocab_size
        _prefill(runner, self._tokens[: len(prompt)])

    def plain(self) -> torch.Tensor:
        """(a): logits [tokens of the output, vocab], one row at a time; their KV stays."""
        return torch.cat([self._root(at) for at in self._rows])

    def trees(self, rows: int, rng: np.random.Generator) -> torch.Tensor:
        """(b): as ``plain``, from trees of so many rows, whose right chains keep their KV."""
        found, at = [], self._rows.start
        while at < self._rows.stop:
            chain = self._tokens[at : at + 1 + rows // 2]
            tree = tree_around(chain, rows, self._vocab, rng)
            found.append(_compute(self._runner, self._tokens[: at + 1], at, tree)[: len(chain)])
            at += len(chain)
        return torch.cat(found)

    def guarded(self) -> torch.Tensor:
        """(c): as ``plain``, each row over the KV that is there; from the end on, so that no row sees one of its own kind."""
        return torch.cat([self._root(at) for at in reversed(self._rows)][::-1])

    def _root(self, at: int) -> torch.Tensor:
        return _compute(self._runner, self._tokens[: at + 1], at, DraftTree.chain(int(self._tokens[at]), ()))


def tree_around(chain: Int32Array, rows: int, vocab: int, rng: np.random.Generator) -> DraftTree:
    """The tree of so many rows with a chain first, and random tokens below random rows of it for the rest."""
    siblings = rows - len(chain)
    tokens = np.concatenate((chain, rng.integers(0, vocab, siblings))).astype(np.int32)
    parents = np.concatenate((np.arange(-1, len(chain) - 1), rng.integers(0, len(chain), siblings))).astype(np.int32)
    return DraftTree(tokens, parents, np.zeros(rows, np.int8), rows)


class Changes:
    """What the logits of one way are beside those of plain decoding, over all texts."""

    def __init__(self) -> None:
        self._deltas: list[FloatArray] = []  # [n, TOP] of the top tokens of (a)
        self._changes: list[FloatArray] = []  # [n]
        self._own_gaps: list[FloatArray] = []  # [n] between the best two of this way
        self._flips: list[npt.NDArray[np.bool_]] = []  # [n]

    def add(self, plain: torch.Tensor, other: torch.Tensor) -> None:
        """Compares the logits [n, vocab] of some positions."""
        plain, other = plain.double(), other.double()
        top, own = plain.topk(TOP, dim=1), other.topk(2, dim=1).values
        best, best_of_other = plain.argmax(1, keepdim=True), other.argmax(1, keepdim=True)
        second = torch.where(top.indices[:, :1] == best, top.indices[:, 1:2], top.indices[:, :1])  # of equals, topk takes any
        flipped = best_of_other != best
        rival = torch.where(flipped, best_of_other, second)
        change = other.gather(1, best) - other.gather(1, rival) - plain.gather(1, best) + plain.gather(1, rival)
        self._deltas.append((other.gather(1, top.indices) - top.values).abs().cpu().numpy())
        self._changes.append(change.abs()[:, 0].cpu().numpy())
        self._own_gaps.append((own[:, 0] - own[:, 1]).cpu().numpy())
        self._flips.append(flipped[:, 0].cpu().numpy())

    @property
    def flips(self) -> npt.NDArray[np.bool_]:
        """[n] where the argmax is another."""
        return np.concatenate(self._flips)

    @property
    def noise(self) -> float:
        """The largest change of a gap."""
        return float(np.concatenate(self._changes).max())

    def near(self, noise: float) -> npt.NDArray[np.bool_]:
        """[n] where the gap is no larger."""
        return np.concatenate(self._own_gaps) <= noise

    def figures(self) -> dict[str, Any]:
        """Quantiles of the changes, and the number of flips."""
        logit, gap = (quantiles(np.concatenate(parts)) for parts in (self._deltas, self._changes))
        return {"logit": logit, "gap": gap, "flips": int(self.flips.sum())}


def measure(
    runner: ModelRunner,
    texts: Sequence[Text],
    rows: Sequence[int],
    seed: int,
    on_text: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Goes along the texts in all ways.

    Args:
        runner: whose first slot is written over.
        texts: what to go along.
        rows: of the trees, each 2 at least.
        seed: of the random siblings.
        on_text: called with the number of texts that are done.

    Returns:
        ``texts``, ``tokens``, ``gaps`` (quantiles in (a)), and ``cases``, one for each number of rows. In it are ``trees`` and
        ``guard``, the changes of (b) and (c) as ``Changes.figures`` gives them; ``flip_gaps``, the gaps in (a) of the flips of
        (b), sorted; ``noise``; the ``recomputed`` tokens of a guard and their ``share``, its cost in forwards of one row a token;
        and the flips that are ``left`` behind it.

    Raises:
        ValueError: there is no text, one is empty or longer than a slot, or a tree would have fewer than two rows.
    """
    if not texts or not rows or min(rows) < 2:
        raise ValueError(f"needs texts, and trees of two rows or more, got {len(texts)} texts and {list(rows)}")
    rng = np.random.default_rng(seed)
    gaps: list[FloatArray] = []
    ways = [(Changes(), Changes()) for _ in rows]
    for done, text in enumerate(texts, start=1):
        walk = Walk(runner, text, max(rows))
        plain = walk.plain()
        best = plain.double().topk(2, dim=1).values
        gaps.append((best[:, 0] - best[:, 1]).cpu().numpy())
        for size, (trees, guarded) in zip(rows, ways, strict=True):
            trees.add(plain, walk.trees(size, rng))
            guarded.add(plain, walk.guarded())
        on_text(done)
    all_gaps = np.concatenate(gaps)
    cases = [_case(size, trees, guarded, all_gaps) for size, (trees, guarded) in zip(rows, ways, strict=True)]
    return {"texts": len(texts), "tokens": len(all_gaps), "gaps": quantiles(all_gaps), "cases": cases}


def _case(rows: int, trees: Changes, guarded: Changes, gaps: FloatArray) -> dict[str, Any]:
    near = trees.near(trees.noise)
    return {
        "rows": rows,
        "trees": trees.figures(),
        "guard": guarded.figures(),
        "flip_gaps": np.sort(gaps[trees.flips]).tolist(),
        "noise": trees.noise,
        "recomputed": int(near.sum()),
        "share": float(near.mean()),
        "left": int(np.where(near, guarded.flips, trees.flips).sum()),
    }


def quantiles(values: FloatArray) -> dict[str, float]:
    """The ``QUANTILES`` of all values."""
    return {name: float(np.quantile(values, at)) for name, at in QUANTILES.items()}


def continuation(runner: ModelRunner, prompt: Sequence[int], most: int, ends: Sequence[int]) -> list[int]:
    """What plain greedy decoding says to a prompt: at most so many tokens, one that ends it among them."""
    tokens = np.array(prompt, np.int32)
    _prefill(runner, tokens)
    for _ in range(most):
        logits = _compute(runner, tokens, len(tokens) - 1, DraftTree.chain(int(tokens[-1]), ()))
        tokens = np.append(tokens, np.int32(logits[0].argmax().item()))
        if int(tokens[-1]) in ends:
            break
    said: list[int] = tokens[len(prompt) :].tolist()
    return said


def load_texts(loaded: LoadedModel, args: argparse.Namespace) -> tuple[ModelRunner, list[Text], list[str]]:
    """A runner with room for the texts, the texts, and the ids of their records.

    Raises:
        PromptFileError: a file cannot be read, or holds no record that fits the context of the model.
    """
    from cluster.prompt_file import PromptFileError, read_prompts
    from experiments.workloads import fits, prompt_ids

    chosen = []
    for path in args.prompts:
        found = [(record, prompt_ids(record, loaded.tokenizer)) for record in read_prompts(path)]
        fitting = [(record, ids) for record, ids in found if fits(len(ids), args.tokens, loaded.max_model_len)]
        if not fitting:
            raise PromptFileError(f"no record of {path} fits the context of {loaded.max_model_len} tokens: lower --tokens")
        chosen += fitting[: args.records]
    longest = max(len(ids) for _, ids in chosen)
    runner = ModelRunner(loaded.model, 1, longest + args.tokens + max(args.rows))
    texts: list[Text] = []
    for record, ids in chosen:
        known = [] if args.own else loaded.tokenizer.encode(record.output or "", add_special_tokens=False)[: args.tokens]
        texts.append((ids, known or continuation(runner, ids, args.tokens, loaded.eos_token_ids)))
    return runner, texts, [record.id for record, _ in chosen]


def print_table(results: dict[str, Any]) -> None:
    """A line for each number of rows."""
    gaps = ", ".join(f"{name} {value:.3g}" for name, value in results["gaps"].items())
    print(f"{results['texts']} texts, {results['tokens']} tokens; gaps of plain decoding: {gaps}")
    print("rows  |d logit| p50   p99    max  |d gap| p50   p99  noise  flips  largest  recomputed  |d gap| of guard  flips  left")
    for case in results["cases"]:
        logit, gap, largest = case["trees"]["logit"], case["trees"]["gap"], max(case["flip_gaps"], default=0.0)
        print(
            f"{case['rows']:>4} {logit['p50']:>14.3g} {logit['p99']:>5.3g} {logit['max']:>6.3g} {gap['p50']:>12.3g}"
            f" {gap['p99']:>5.3g} {case['noise']:>6.3g} {case['trees']['flips']:>6} {largest:>8.3g} {case['share']:>11.2%}"
            f" {case['guard']['gap']['max']:>17.3g} {case['guard']['flips']:>6} {case['left']:>5}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes the record; the exit code."""
    from configs.schema import find_model
    from experiments.record import write_record
    from experiments.run_options import parsed, run_parser

    parser = run_parser(__doc__, dtype="bfloat16", dtypes=get_args(Dtype)[1:])
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON-lines files with prompt and output")
    parser.add_argument("--records", type=int, default=4, help="of each file, the first that fit")
    parser.add_argument("--tokens", type=int, default=128, help="most of an output")
    parser.add_argument("--own", action="store_true", help="go along what the model says itself, not along the known outputs")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 16, 64], help="of the trees")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the random siblings")
    args = parsed(parser, argv, records=1, tokens=1, rows=2, threads=1)
    started = datetime.now(UTC)
    options = ModelOptions(find_model(args.model), dtype=args.dtype, device=args.device, threads=args.threads)
    loaded = load_model(options)
    runner, texts, ids = load_texts(loaded, args)
    results = measure(runner, texts, args.rows, args.seed, lambda done: print(f"{done}/{len(texts)} texts", file=sys.stderr))
    print_table(results)
    device = str(loaded.model.device)
    results |= {"dtype": args.dtype, "record_ids": ids}
    path = write_record("near-ties", vars(args), results, args.seed, started, device, args.out)
    print(f"record: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
