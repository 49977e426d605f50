"""Train the demo model of the repository, a small Llama that answers from documents in its prompt.

    python -m experiments.training.train --corpus CORPUS --out build/demo_model

The run is a function of its arguments and the seed, up to the order of floating-point sums in threads. It can be interrupted, and
``--resume`` continues it. The learning rate warms up, stays, and falls linearly to zero over the last ``--decay-steps``, in which
windows are twice as long so that the whole context is trained. ``--steps`` may be changed before the decay begins. The folder
``model`` and ``loss.svg``, the curve of held-out loss and accuracy, are written at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.experiments.training.data import END_OF_TEXT, Windows, encode, read_records, train_tokenizer

CONTEXT = 2048
ROPE_THETA = 500_000.0
COPY_SHARE = 0.15  # of generated copying after the first ``--copy-steps``
PEAK_RATE, SEED = 3e-3, 0
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}" + END_OF_TEXT + "\n\n"
    "{% elif message['role'] == 'user' %}### Question\n{{ message['content'] }}\n\n### Answer\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train-*.jsonl.gz and valid.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, metrics and the finished model")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--decay-steps", type=int, default=650)
    parser.add_argument("--rows", type=int, default=4, help="windows per step")
    parser.add_argument("--window", type=int, default=1024, help="tokens per window")
    parser.add_argument("--copy-steps", type=int, default=300, help="first steps, with half of the text generated for copying")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to reuse, such as the target model's for a draft model")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--intermediate-size", type=int, default=768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=250)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Return a Llama with grouped-query attention and tied embeddings."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab_size,
            hidden_size=args.hidden_size,
            num_hidden_layers=args.layers,
            intermediate_size=args.intermediate_size,
            num_attention_heads=args.hidden_size // 64,
            num_key_value_heads=max(1, args.hidden_size // 128),
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            attn_implementation="sdpa",
        )
    )


@torch.no_grad()
def start_with_induction(model: LlamaForCausalLM, seed: int) -> None:
    """Initialize the first two layers so that the model copies before it is trained.

    An induction circuit (Olsson et al., 2022, arXiv 2209.11895) arises by itself only after more text than the corpus. Layer 0
    attends to the previous token: all embeddings share one constant coordinate, whose query and key are a fixed vector and the
    same vector turned by one position, so that their rotary product is largest at distance 1; it copies the first half of that
    token's embedding into the second half of the residual. Layer 1 looks for the current token among those copies, in the rotary
    frequencies that hardly turn within the context, and writes the embedding of the token found there. All of it is trained on.
    """
    config, (first, second) = model.config, (layer.self_attn for layer in model.model.layers[:2])
    width, half, size = config.hidden_size, config.hidden_size // 2, 64
    constant, spread, pairs = width - 1, 0.1, size // 2
    generator = torch.Generator().manual_seed(seed)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, spread, generator=generator)
    embedding[:, half:] *= 0.1
    embedding[:, constant] = 5 * spread
    frequencies = ROPE_THETA ** (-torch.arange(pairs) / pairs)
    for projection in (first.q_proj, first.k_proj, first.o_proj, second.o_proj):
        projection.weight *= 0.1
    root = torch.zeros(pairs)
    root[:7] = torch.tensor([4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0]).sqrt()
    turned = torch.cat([root * frequencies.cos(), root * frequencies.sin()])
    gain = math.sqrt(20.0) / (5 * spread / embedding.pow(2).mean().sqrt())  # undoes the scale of the constant after the norm
    first.q_proj.weight[:, constant] = torch.cat([root, torch.zeros(pairs)]).repeat(config.num_attention_heads) * gain
    first.k_proj.weight[:, constant] = turned.repeat(config.num_key_value_heads) * gain
    slow = (frequencies < 0.01).nonzero().flatten()
    dims = torch.cat([slow, slow + pairs])
    group = config.num_attention_heads // config.num_key_value_heads
    for kv in range(config.num_key_value_heads):
        keys, queries = slice(kv * size, (kv + 1) * size), slice(kv * group * size, (kv * group + 1) * size)
        identity = torch.zeros(size, width)
        identity[:, keys] = torch.eye(size)
        first.v_proj.weight[keys] = second.v_proj.weight[keys] = identity
        shifted = identity.roll(half, dims=1)
        shifted[:, constant] = 0.0
        first.o_proj.weight[:, queries] += spread * shifted.T
        second.o_proj.weight[:, queries] += 8 * spread * identity.T
        match = torch.randn(len(dims), half, generator=generator) * 2.0 / math.sqrt(half)
        second.q_proj.weight[queries] = 0.0
        second.k_proj.weight[keys] = 0.0
        second.q_proj.weight[queries.start + dims, :half] = match
        second.k_proj.weight[keys.start + dims, half:] = match
        second.k_proj.weight[keys.start + dims, constant] = 0.0


@torch.no_grad()
def held_out(model: LlamaForCausalLM, records: list[dict[str, str]], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the mean loss over all tokens and over answers, and the share of answer tokens predicted, on held-out records."""
    sums = np.zeros(5)
    for record in records:
        sequence = encode(record["text"], tokenizer)
        if len(sequence.tokens) > CONTEXT:
            continue
        tokens = torch.from_numpy(sequence.tokens.astype(np.int64))[None].to(model.device)
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none").cpu().numpy()
        hits = (logits.argmax(-1) == tokens[0, 1:]).cpu().numpy()
        answer = sequence.weights[1:] == 1.0
        sums += [losses.sum(), len(losses), losses[answer].sum(), answer.sum(), hits[answer].sum()]
    return {"loss": sums[0] / sums[1], "answer_loss": sums[2] / sums[3], "answer_accuracy": sums[4] / sums[3]}


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder for transformers: bfloat16 safetensors, tokenizer, chat template."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = 0
    copy.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip


class Training:
    """Model, optimizers and data of a run, with its checkpoint."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, records: list[dict[str, str]]) -> None:
        torch.manual_seed(SEED)
        self.args, self.model = args, build_model(args)
        start_with_induction(self.model, SEED)
        self.model.to(args.device)
        hidden = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizers = [
            torch.optim.Muon(hidden, lr=PEAK_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step, self.tokens_seen, self.seconds = 0, 0, 0.0
        self._tokenizer, self._records = tokenizer, records
        self._windows: dict[bool, Windows] = {}
        self._rng = np.random.default_rng(SEED + 7)

    def train_step(self) -> float:
        """Run one optimizer step and return its loss."""
        args, began = self.args, time.perf_counter()
        rate = PEAK_RATE * min(1.0, (self.step + 1) / 100) * min(1.0, (args.steps - self.step) / args.decay_steps)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        loss = self._loss(self.step >= args.steps - args.decay_steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - began
        return float(loss.detach())

    def _loss(self, decay: bool) -> torch.Tensor:
        """Return the mean cross-entropy of the next windows; in the decay they are twice as long and half as many.

        A weight is the probability that a position counts, and only these positions have logits.
        """
        args = self.args
        if decay not in self._windows:
            seed = SEED * 1000 + 2 * self.step + decay
            self._windows[decay] = Windows(self._records, self._tokenizer, args.window * (2 if decay else 1), seed)
        rows, share = max(1, args.rows // 2) if decay else args.rows, 0.5 if self.step < args.copy_steps else COPY_SHARE
        tokens, targets, weights = self._windows[decay].batch(rows, share)
        self.tokens_seen += weights.size
        counted = self._rng.random(weights.shape) < weights
        ids, wanted, selected = (torch.from_numpy(array).to(args.device) for array in (tokens, targets, counted))
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[selected])
        return torch.nn.functional.cross_entropy(logits.float(), wanted[selected])

    def save(self, path: Path) -> None:
        """Write the checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": [self.step, self.tokens_seen, self.seconds],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint; the order of the data is from then on a function of its step."""
        state = torch.load(path, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens_seen, self.seconds = state["counters"]
        self._rng = np.random.default_rng(SEED + 7 + self.step)


def train(args: argparse.Namespace) -> None:
    """Run the training, from the checkpoint if ``args.resume``, to the finished model."""
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    records = list(read_records(sorted(args.corpus.glob("train-*.jsonl.gz"))))
    valid = list(read_records([args.corpus / "valid.jsonl.gz"]))[:120]
    tokenizer_file, checkpoint, metrics_file = (args.out / name for name in ("tokenizer.json", "checkpoint.pt", "metrics.jsonl"))
    if args.tokenizer is not None:
        tokenizer_file.write_bytes(args.tokenizer.read_bytes())
    elif not tokenizer_file.exists():
        train_tokenizer((record["text"] for record in records), args.vocab_size).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    run = Training(args, tokenizer, records)
    if args.resume and checkpoint.exists():
        run.load(checkpoint)
    (args.out / "arguments.json").write_text(json.dumps({k: str(v) for k, v in vars(args).items()}, indent=1))
    parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(records)} records, from step {run.step} to {args.steps}", flush=True)
    recent = math.nan
    with metrics_file.open("a" if args.resume else "w") as metrics:
        while run.step < args.steps:
            loss = run.train_step()
            recent = loss if math.isnan(recent) else 0.95 * recent + 0.05 * loss
            if run.step % 50 == 0:
                rate, seen = run.tokens_seen / run.seconds, run.tokens_seen / 1e6
                print(f"step {run.step}/{args.steps}  loss {recent:.3f}  {seen:.1f} M tokens  {rate:.0f}/s", flush=True)
            if run.step % args.evaluate_every == 0 or run.step == args.steps:
                run.model.eval()
                found = held_out(run.model, valid, tokenizer)
                run.model.train()
                row = {"step": run.step, "tokens": run.tokens_seen, "seconds": run.seconds, "train_loss": recent, **found}
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()
                run.save(checkpoint)
                print("held out: " + "  ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
    export(run.model, tokenizer, args.out / "model")
    if find_spec("matplotlib") is None:
        print("no loss.svg: it needs matplotlib, which the extra `dev` has", file=sys.stderr)
    else:
        draw_curve(metrics_file, args.out / "loss.svg")
    print(f"model written to {args.out / 'model'}", flush=True)


def draw_curve(metrics: Path, out: Path) -> None:
    """Draw held-out loss and accuracy by tokens seen; of a step that was repeated after an interruption the last row counts."""
    from outrider.experiments.bench.figure import draw, panel

    by_step = {row["step"]: row for row in map(json.loads, metrics.read_text(encoding="utf-8").splitlines())}
    rows = [by_step[step] for step in sorted(by_step)]

    def line(key: str, scale: float = 1.0) -> dict[float, float]:
        return {row["tokens"] / 1e6: scale * row[key] for row in rows}

    seen, last = "training tokens seen (millions)", rows[-1]
    losses = {
        f"whole records (last: {last['loss']:.2f})": line("loss"),
        f"answers (last: {last['answer_loss']:.2f})": line("answer_loss"),
    }
    accuracy = {f"answers (last: {100 * last['answer_accuracy']:.1f} %)": line("answer_accuracy", 100)}
    panels = {
        "held-out loss": panel("curves", "", seen, "nats per token", losses),
        "tokens predicted": panel("curves", "", seen, "%", accuracy),
    }
    draw(panels, out)


if __name__ == "__main__":
    train(arguments())
