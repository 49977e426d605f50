"""Distils a draft model from a model: a few of its layers, trained to say what all of them say.

    python -m experiments.training.distill --model smollm2-135m-instruct --corpus CORPUS --out build/smollm2-draft

The model answers questions of the corpus, greedily and drawn in turns, and reads further records with their own answers. The
draft model keeps the embeddings as they are and ``--layers`` of the layers, which learn the model's distributions at all tokens
of the answers and some of the prompts (Hinton et al., 2015, arXiv 1503.02531). What is done is kept in ``--out``: the same
command goes on where it was. In the end there are a folder for transformers, ``model``, and of the packaged model a file of four
bits a weight, ``model.gguf``: ``speculation.draft_model`` takes either.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from engine.loading.model import load_weights
from engine.loading.model_files import find_files
from engine.text.chat import render_chat
from engine.text.tokenizer import load_tokenizer_alone
from experiments.bench.progress import Progress
from experiments.bench.workloads import run_engine
from experiments.peers.gguf_file import PACKAGED, packaged_file, write_gguf
from experiments.training.data import read_records, relaid

ANSWER_TOKENS = 80
CONTEXT = 640  # tokens of a prompt and its answer
RANKS = 32  # of a distribution, that are learned
PROMPT_SHARE = 0.2  # of a prompt's tokens are learned
BATCH_TOKENS = 1536
SAVED = 100  # steps
READ = 256  # texts that are kept together
_HEADINGS = "### Question\n", "\n\n### Answer\n"


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer, and what the model says of it."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]  # [learned] whose next tokens are learned
    ids: np.ndarray[Any, np.dtype[np.int64]]  # [learned, RANKS] the likeliest next tokens, the likeliest first
    log_probs: np.ndarray[Any, np.dtype[np.float32]]  # [learned, RANKS]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a Llama with a chat template")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train-*.jsonl.gz and valid.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is kept and for the draft model")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, -1], help="of the model, that the draft model has")
    parser.add_argument("--answers", type=int, default=1500, help="questions that the model answers")
    parser.add_argument("--texts", type=int, default=3000, help="further records with the corpus' answers")
    parser.add_argument("--held-out", type=int, default=40, help="questions that are answered and not learned from")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def questions(paths: Sequence[Path], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of a chat's prompt and of the corpus' answer, of records that have both and fit, in an order drawn by the seed."""
    records, rng = list(read_records(paths)), np.random.default_rng(seed)
    for at in rng.permutation(len(records)).tolist():
        question, heading, answer = relaid(records[at]["text"], rng).partition(_HEADINGS[1])
        if heading and question.startswith(_HEADINGS[0]):
            prompt = render_chat(tokenizer, [{"role": "user", "content": question.removeprefix(_HEADINGS[0])}])
            ids = tokenizer.encode(answer.partition("\n\n" + _HEADINGS[0])[0].rstrip(), add_special_tokens=False)[:ANSWER_TOKENS]
            if ids and len(prompt) <= CONTEXT - ANSWER_TOKENS:
                yield prompt, ids


def answer(
    path: Path, wanted: Sequence[list[int]], drawn: bool, args: argparse.Namespace, progress: Progress
) -> list[tuple[list[int], list[int]]]:
    """Prompts with the model's own answers, every second one drawn if ``drawn``; those in the file are there already."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if len(known) < len(wanted):
        engine = Engine.load(
            ModelOptions(path=args.model, threads=args.threads), EngineOptions(max_running=32), SpeculationOptions()
        )
        with torch.inference_mode(), path.open("a") as kept:
            for start in range(len(known), len(wanted), 64):
                requests = [
                    Request(str(at), prompt, SamplingParams(ANSWER_TOKENS, temperature=float(drawn and at % 2), seed=at))
                    for at, prompt in enumerate(wanted[start : start + 64], start)
                ]
                run_engine(engine, requests, lambda request: progress.note(f"answer {request.request_id} of {len(wanted)}"))
                for request in requests:
                    kept.write(json.dumps([request.prompt_ids.tolist(), request.output_ids.tolist()]) + "\n")
                kept.flush()
        known = [json.loads(line) for line in path.read_text().splitlines()]
    return [(prompt, output) for prompt, output in known[: len(wanted)]]


@torch.inference_mode()
def read(
    folder: Path,
    model: PreTrainedModel,
    pairs: Sequence[tuple[list[int], list[int]]],
    share: float,
    seed: int,
    progress: Progress,
) -> list[Text]:
    """What the model says of prompts and answers, at the answers' tokens and a share of the prompts'; kept in the folder."""
    folder.mkdir(exist_ok=True)
    texts: list[Text] = []
    for start in range(0, len(pairs), READ):
        path, part = folder / f"{start}.pt", pairs[start : start + READ]
        known = [Text(*map(torch.Tensor.numpy, one)) for one in torch.load(path)] if path.exists() else []
        if [text.tokens.tolist() for text in known] != [prompt + output for prompt, output in part]:
            rng, known = np.random.default_rng(seed + start), []
            for at, (prompt, output) in enumerate(part, start):
                progress.note(f"text {at} of {len(pairs)}")
                tokens = torch.tensor(prompt + output)
                some = np.flatnonzero(rng.random(len(prompt) - 1) < share)
                positions = np.concatenate([some, np.arange(len(prompt) - 1, len(tokens) - 1)])
                hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0, positions]
                values, ids = model.lm_head(hidden).float().log_softmax(-1).topk(RANKS)
                known.append(Text(tokens.numpy(), positions, ids.numpy(), values.numpy()))
            kept = [tuple(torch.from_numpy(getattr(text, name)) for name in Text.__slots__) for text in known]
            torch.save(kept, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
        texts += known
    return texts


def draft_model(model: PreTrainedModel, layers: Sequence[int]) -> LlamaForCausalLM:
    """The model with some of its layers, in float32; embeddings are the model's own and learn nothing.

    Raises:
        ValueError: it is no Llama, or has no such layer.
    """
    count = model.config.num_hidden_layers
    if model.config.model_type != "llama" or not all(-count <= layer < count for layer in layers):
        raise ValueError(
            f"--layers {layers}: a Llama with these layers is needed, this is {model.config.model_type} with {count}"
        )
    config = type(model.config).from_dict(model.config.to_dict() | {"num_hidden_layers": len(layers)})
    small = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    small.model.embed_tokens, small.lm_head = model.model.embed_tokens, model.lm_head
    for own, layer in zip(small.model.layers, layers, strict=True):
        own.load_state_dict(model.model.layers[layer].state_dict())
    small.model.norm.load_state_dict(model.model.norm.state_dict())
    for weight in (small.model.embed_tokens.weight, small.lm_head.weight):
        weight.requires_grad_(False)
    return small


def log_probs(small: LlamaForCausalLM, texts: Sequence[Text]) -> Iterator[tuple[Text, torch.Tensor]]:
    """The draft model's logarithms of probabilities at what is learned of each text: [learned, vocabulary]."""
    tokens = np.zeros((len(texts), max(len(text.tokens) for text in texts)), np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens  # what fills a row up comes after all that counts
    with torch.autocast("cpu", torch.bfloat16):
        hidden = small.model(input_ids=torch.from_numpy(tokens), use_cache=False).last_hidden_state
        for row, text in enumerate(texts):
            yield text, small.lm_head(hidden[row, text.positions]).float().log_softmax(-1)


def loss_of(small: LlamaForCausalLM, texts: Sequence[Text]) -> torch.Tensor:
    """Mean cross-entropy with the model's distributions, as far as their likeliest tokens go."""
    losses = []
    for text, ours in log_probs(small, texts):
        losses.append(-(torch.from_numpy(text.log_probs).exp() * ours.gather(1, torch.from_numpy(text.ids))).sum(1))
    return torch.cat(losses).mean()


@torch.inference_mode()
def agreement(small: LlamaForCausalLM, texts: Sequence[Text]) -> float:
    """The share of the tokens at which both models' likeliest next token is the same."""
    same = [ours.argmax(1).numpy() == text.ids[:, 0] for one in texts for text, ours in log_probs(small, [one])]
    return float(np.concatenate(same).mean())


def batches(texts: Sequence[Text], seed: int) -> Iterator[list[Text]]:
    """All texts once, those of like length together, in an order drawn by the seed."""
    rng, parts, used = np.random.default_rng(seed), [[]], 0  # type: tuple[np.random.Generator, list[list[Text]], int]
    for text in sorted(texts, key=lambda text: len(text.tokens) + 32 * rng.random()):
        if used and (used + 1) * len(text.tokens) > BATCH_TOKENS:
            parts.append([])
            used = 0
        parts[-1].append(text)
        used += 1
    for at in rng.permutation(len(parts)).tolist():
        yield parts[at]


def learn(
    small: LlamaForCausalLM, texts: Sequence[Text], held: Sequence[Text], args: argparse.Namespace, progress: Progress
) -> None:
    """Trains the layers, from the checkpoint if there is one; the rate falls linearly to zero."""
    weights = [weight for weight in small.parameters() if weight.requires_grad]
    optimizer, step, checkpoint = (
        torch.optim.AdamW(weights, args.lr, betas=(0.9, 0.95), weight_decay=0.01),
        0,
        args.out / "checkpoint.pt",
    )
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        small.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    recent, epoch = 0.0, step
    order: Iterator[list[Text]] = iter(())
    while step < args.steps:
        if (batch := next(order, None)) is None:
            order, epoch = batches(texts, args.seed + epoch), epoch + 1
            continue
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 50) * (1 - step / args.steps)
        loss = loss_of(small, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        recent = float(loss.detach()) if not recent else 0.95 * recent + 0.05 * float(loss.detach())
        progress.note(f"step {step} of {args.steps}, loss {recent:.3f}")
        if step % SAVED == 0 or step == args.steps:
            learned = {name: weight for name, weight in small.state_dict().items() if "layers" in name or "norm" in name}
            torch.save({"model": learned, "optimizer": optimizer.state_dict(), "step": step}, checkpoint.with_suffix(".partial"))
            checkpoint.with_suffix(".partial").replace(checkpoint)
            same = agreement(small, held)
            progress.say(f"step {step} of {args.steps}, loss {recent:.3f}, held out: {same:.3f} of the tokens as the model's")


def distil(args: argparse.Namespace) -> None:
    """The whole run."""
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    name, args.model = args.model, find_files(args.model)
    tokenizer = load_tokenizer_alone(args.model)
    with Progress() as progress:
        progress.say("questions")
        trained = questions(sorted(args.corpus.glob("train-*.jsonl.gz")), tokenizer, args.seed)
        pairs = list(islice(trained, args.answers + args.texts))
        unknown = islice(questions([args.corpus / "valid.jsonl.gz"], tokenizer, args.seed), args.held_out)
        progress.say("answers")
        held = answer(args.out / "held_out.jsonl", [prompt for prompt, _ in unknown], False, args, progress)
        own = answer(args.out / "answers.jsonl", [prompt for prompt, _ in pairs[: args.answers]], True, args, progress)
        progress.say("what the model says of them")
        model = load_weights(args.model, torch.bfloat16, "sdpa").eval()
        others = pairs[args.answers :]
        texts = read(args.out / "texts", model, own + others, PROMPT_SHARE, args.seed, progress)
        tested = read(args.out / "held_out", model, held, 0.0, args.seed, progress)
        learned = sum(len(text.positions) for text in texts)
        small = draft_model(model, args.layers)
        progress.say(f"{learned} tokens to learn, of {len(own)} own answers and {len(others)} of the corpus")
        learn(small, texts, tested, args, progress)
        small.to(torch.bfloat16).save_pretrained(args.out / "model")
        tokenizer.save_pretrained(args.out / "model")
        if name == PACKAGED:
            write_gguf(str(args.out / "model"), "q4_1", packaged_file(args.out), args.out / "model.gguf")
        progress.say(f"the draft model is in {args.out}")


if __name__ == "__main__":
    distil(arguments())
