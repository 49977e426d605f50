"""Trains the demo model that the repository ships: a small Llama that answers from documents in its prompt.

    python -m experiments.training.train --corpus ../shared/corpus --out build/demo_model

The run is a function of its arguments and the seed (up to the order of floating-point sums in threads). It can be stopped at
any time and goes on with ``--resume``. The learning rate warms up, stays, and falls linearly to zero over the last
``--decay-steps``; in that last part windows are twice as long, so that the whole context is trained. ``--steps`` may be changed
before the decay has begun, so the length of a run need not be known at its start.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.training.data import END_OF_TEXT, Windows, encode, read_records, train_tokenizer

CONTEXT = 2048
ROPE_THETA = 500_000.0
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}" + END_OF_TEXT + "\n\n"
    "{% elif message['role'] == 'user' %}### Question\n{{ message['content'] }}\n\n### Answer\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train-*.jsonl.gz and valid.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, metrics and the finished model")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--decay-steps", type=int, default=650)
    parser.add_argument("--rows", type=int, default=4, help="windows per step")
    parser.add_argument("--window", type=int, default=1024, help="tokens per window")
    parser.add_argument("--copy-steps", type=int, default=300, help="first steps, with half the text generated for copying")
    parser.add_argument("--copy-share", type=float, default=0.15, help="share of generated copying afterwards")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to keep, so that the model drafts for one that has it")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--intermediate-size", type=int, default=768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=250)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with grouped-query attention and tied embeddings."""
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
    """Sets the first two layers so that the model copies before it has learned anything.

    An induction circuit (Olsson et al., 2022, arXiv 2209.11895) arises by itself only after more text than there is here. Layer
    0 attends to the previous token: all embeddings share one constant coordinate, whose query and key are a fixed vector and the
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
    gain = math.sqrt(20.0) / (5 * spread / embedding.pow(2).mean().sqrt())  # the constant after the norm, taken out
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


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up over 100 steps, constant, linear decay over the last ``decay_steps``."""
    warm = min(1.0, (step + 1) / 100)
    return args.lr * warm * min(1.0, (args.steps - step) / args.decay_steps)


def selected_loss(model: LlamaForCausalLM, tokens: torch.Tensor, targets: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the targets at the selected positions; logits are computed for those alone.

    tokens: [rows, window + 1] int64. targets: [rows, window] int64. selected: [rows, window] bool.
    """
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[selected])
    return torch.nn.functional.cross_entropy(logits.float(), targets[selected])


@torch.no_grad()
def held_out(model: LlamaForCausalLM, records: list[dict[str, str]], tokenizer: Tokenizer) -> dict[str, float]:
    """Mean loss over all tokens and over answers, and the share of answer tokens predicted, on held-out records."""
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
    """The finished model as transformers loads it: bf16 safetensors, tokenizer, chat template."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = 0
    copy.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


class Training:
    """Model, optimizers and data of one run, with its checkpoint."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, records: list[dict[str, str]]) -> None:
        torch.manual_seed(args.seed)
        self.args, self.model = args, build_model(args)
        start_with_induction(self.model, args.seed)
        self.model.to(args.device)
        hidden = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizers = [
            torch.optim.Muon(hidden, lr=args.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step, self.tokens_seen, self.seconds = 0, 0, 0.0
        self._tokenizer, self._records = tokenizer, records
        self._windows: dict[bool, Windows] = {}
        self._rng = np.random.default_rng(args.seed + 7)

    def windows(self, long: bool) -> Windows:
        """Data for the constant part (``long`` false) or the decay."""
        if long not in self._windows:
            window = self.args.window * (2 if long else 1)
            seed = self.args.seed * 1000 + 2 * self.step + long
            self._windows[long] = Windows(self._records, self._tokenizer, window, seed)
        return self._windows[long]

    def train_step(self) -> float:
        """One optimizer step; returns its loss."""
        args, started = self.args, time.perf_counter()
        falling = self.step >= args.steps - args.decay_steps
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(self.step, args)
        loss = self.window_loss(falling)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - started
        return float(loss.detach())

    def window_loss(self, falling: bool) -> torch.Tensor:
        """The loss of the next windows: longer ones, and half as many, while the rate falls."""
        args = self.args
        share = 0.5 if self.step < args.copy_steps else args.copy_share
        tokens, targets, weights = self.windows(falling).batch(max(1, args.rows // 2) if falling else args.rows, share)
        selected = self._rng.random(weights.shape) < weights  # a weight is the chance that a position counts
        self.tokens_seen += weights.size
        return selected_loss(self.model, *(torch.from_numpy(array).to(args.device) for array in (tokens, targets, selected)))

    def save(self, path: Path) -> None:
        """Writes the checkpoint; a cut never leaves half a file."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": [self.step, self.tokens_seen, self.seconds],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint; the data order from there on is a function of the step it was taken at."""
        state = torch.load(path, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens_seen, self.seconds = state["counters"]
        self._rng = np.random.default_rng(self.args.seed + 7 + self.step)


def train(args: argparse.Namespace) -> None:
    """The whole run, from the checkpoint in ``args.out`` if it is to be resumed, to the finished model."""
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    records = list(read_records(sorted(args.corpus.glob("train-*.jsonl.gz"))))
    valid = list(read_records([args.corpus / "valid.jsonl.gz"]))[:120]
    tokenizer_file, checkpoint = args.out / "tokenizer.json", args.out / "checkpoint.pt"
    if args.tokenizer is not None:
        tokenizer_file.write_bytes(args.tokenizer.read_bytes())
    elif not tokenizer_file.exists():
        print(f"training a tokenizer of {args.vocab_size} entries on {len(records)} records", flush=True)
        train_tokenizer((record["text"] for record in records), args.vocab_size).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    run = Training(args, tokenizer, records)
    if args.resume and checkpoint.exists():
        run.load(checkpoint)
    (args.out / "arguments.json").write_text(json.dumps({k: str(v) for k, v in vars(args).items()}, indent=1))
    parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(records)} records, from step {run.step} to {args.steps}", flush=True)
    recent = math.nan
    with (args.out / "metrics.jsonl").open("a" if args.resume else "w") as metrics:
        while run.step < args.steps:
            loss = run.train_step()
            recent = loss if math.isnan(recent) else 0.95 * recent + 0.05 * loss
            if run.step % 50 == 0:
                rate = run.tokens_seen / run.seconds
                print(
                    f"step {run.step}/{args.steps}  loss {recent:.3f}  {run.tokens_seen / 1e6:.1f} M tokens  {rate:.0f}/s",
                    flush=True,
                )
            if run.step % args.evaluate_every == 0 or run.step == args.steps:
                run.model.eval()
                row = {"step": run.step, "tokens": run.tokens_seen, "seconds": run.seconds, "train_loss": recent}
                row |= held_out(run.model, valid, tokenizer)
                run.model.train()
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()
                run.save(checkpoint)
                print(
                    "held out: " + "  ".join(f"{k} {row[k]:.3f}" for k in ("loss", "answer_loss", "answer_accuracy")), flush=True
                )
    export(run.model, tokenizer, args.out / "model")
    print(f"model written to {args.out / 'model'}", flush=True)


if __name__ == "__main__":
    train(arguments())
