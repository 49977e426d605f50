"""Distill a draft model from a model: a few of its layers, trained to imitate all of them.

    python -m experiments.training.distill --model smollm2-135m-instruct --corpus CORPUS --out build/smollm2-draft

The model answers questions of the corpus, greedily and sampled in turns, and reads further records with the corpus' answers.
The draft model keeps the embeddings and ``--layers`` of the layers, which learn the model's distributions at all tokens of the
answers and some of the prompts (Hinton et al., 2015, arXiv 1503.02531). With ``--vocabulary N`` it drafts the N likeliest tokens
of these texts alone and reads all of them: the output layer is most of a small model's time. Its configuration lists them as
``draft_token_ids``. Finished parts are kept in ``--out``, so that the same command continues an interrupted run. At the end there
are a folder for transformers, ``model``, and for the packaged model with all its tokens a file of four bits per weight,
``model.gguf``; ``speculation.draft_model`` accepts both.
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

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.loading.model import load_weights
from outrider.engine.loading.model_files import find_files
from outrider.engine.text.chat import render_chat
from outrider.engine.text.tokenizer import load_tokenizer_alone
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.workloads import run_engine
from outrider.experiments.peers.gguf_file import PACKAGED, packaged_file, write_gguf
from outrider.experiments.training.data import read_records, relaid

ANSWER_TOKENS = 80
CONTEXT = 640  # tokens of a prompt and its answer
RANKS = 32  # learned tokens of a distribution
PROMPT_SHARE = 0.2  # learned share of a prompt's tokens
BATCH_TOKENS = 1536
SAVED = 100  # steps between checkpoints
READ = 256  # texts per file
SEED = 0
_HEADINGS = "### Question\n", "\n\n### Answer\n"


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its answer, and the model's distributions."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]  # [learned], whose next tokens are learned
    ids: np.ndarray[Any, np.dtype[np.int64]]  # [learned, RANKS] the likeliest next tokens, the likeliest first
    log_probs: np.ndarray[Any, np.dtype[np.float32]]  # [learned, RANKS]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a Llama with a chat template")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train-*.jsonl.gz and valid.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for intermediate results and the draft model")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, -1], help="layers of the model that the draft model has")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="tokens that are drafted, the likeliest N; default: all")
    parser.add_argument("--answers", type=int, default=1500, help="questions that the model answers")
    parser.add_argument("--texts", type=int, default=3000, help="further records, with the corpus' answers")
    parser.add_argument("--held-out", type=int, default=40, help="questions that are answered and not learned")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak of the learning rate")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(argv)


def questions(paths: Sequence[Path], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of a chat's prompt and of the corpus' answer for records that have both and fit, in random order."""
    records, rng = list(read_records(paths)), np.random.default_rng(SEED)
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
    """Return prompts with the model's answers, every second one sampled if ``drawn``; answers in the file are reused."""
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
    folder: Path, model: PreTrainedModel, pairs: Sequence[tuple[list[int], list[int]]], share: float, progress: Progress
) -> list[Text]:
    """Return the model's distributions at the tokens of answers and a share of the prompts'; results in the folder are reused."""
    folder.mkdir(exist_ok=True)
    texts: list[Text] = []
    for start in range(0, len(pairs), READ):
        path, part = folder / f"{start}.pt", pairs[start : start + READ]
        known = [Text(*map(torch.Tensor.numpy, one)) for one in torch.load(path)] if path.exists() else []
        if [text.tokens.tolist() for text in known] != [prompt + output for prompt, output in part]:
            rng, known = np.random.default_rng(SEED + start), []
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


def likeliest(texts: Sequence[Text], count: int, tokens: int) -> list[int]:
    """Return the ids of the likeliest tokens in the learned distributions, in ascending order.

    Raises:
        ValueError: ``count`` is not from 1 to the model's number of ``tokens``.
    """
    if not 1 <= count <= tokens:
        raise ValueError(f"--vocabulary {count} must be from 1 to the model's {tokens} tokens")
    mass = sum(np.bincount(text.ids.ravel(), np.exp(text.log_probs).ravel(), tokens) for text in texts)
    return np.sort(np.argsort(-mass, kind="stable")[:count]).tolist()


def draft_model(model: PreTrainedModel, layers: Sequence[int], token_ids: Sequence[int] | None = None) -> LlamaForCausalLM:
    """Return the model with some of its layers and the logits of some tokens, in float32; the embeddings do not learn.

    Raises:
        ValueError: it is not a Llama, or has no such layer.
    """
    count = model.config.num_hidden_layers
    if model.config.model_type != "llama" or not all(-count <= layer < count for layer in layers):
        raise ValueError(
            f"--layers {layers}: a Llama with these layers is needed, this is {model.config.model_type} with {count}"
        )
    sizes = {"num_hidden_layers": len(layers), "draft_token_ids": None if token_ids is None else list(token_ids)}
    config = type(model.config).from_dict(model.config.to_dict() | sizes)
    small = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    head = model.lm_head.weight
    small.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.float(), requires_grad=False)
    small.lm_head.weight = torch.nn.Parameter(head[_ids(small)].float(), requires_grad=False)
    for own, layer in zip(small.model.layers, layers, strict=True):
        own.load_state_dict(model.model.layers[layer].state_dict())
    small.model.norm.load_state_dict(model.model.norm.state_dict())
    return small


def _ids(small: LlamaForCausalLM) -> torch.Tensor:
    """Return the ids of the tokens that the logits are of."""
    ids = small.config.draft_token_ids
    return torch.arange(small.config.vocab_size) if ids is None else torch.tensor(ids)


def training_dtype() -> torch.dtype:
    """Return bfloat16 where the processor multiplies in it, else float32."""
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def log_probs(small: LlamaForCausalLM, texts: Sequence[Text]) -> Iterator[tuple[Text, torch.Tensor]]:
    """Yield each text with the draft model's log-probabilities at its learned positions: [learned, drafted tokens]."""
    tokens = np.zeros((len(texts), max(len(text.tokens) for text in texts)), np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens  # padding comes after all positions that count
    dtype = training_dtype()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        hidden = small.model(input_ids=torch.from_numpy(tokens), use_cache=False).last_hidden_state
        for row, text in enumerate(texts):
            yield text, small.lm_head(hidden[row, text.positions]).float().log_softmax(-1)


def loss_of(small: LlamaForCausalLM, texts: Sequence[Text]) -> torch.Tensor:
    """Return the mean cross-entropy with the model's distributions over the likeliest tokens that the draft model drafts."""
    losses, columns, ids = [], torch.full((small.config.vocab_size,), -1), _ids(small)
    columns[ids] = torch.arange(len(ids))
    for text, ours in log_probs(small, texts):
        at = columns[torch.from_numpy(text.ids)]
        wanted = torch.from_numpy(text.log_probs).exp() * (at >= 0)
        losses.append(-(wanted * ours.gather(1, at.clamp(min=0))).sum(1))
    return torch.cat(losses).mean()


@torch.inference_mode()
def agreement(small: LlamaForCausalLM, texts: Sequence[Text]) -> float:
    """Return the share of positions at which both models have the same likeliest next token."""
    ids = _ids(small)
    same = [ids[ours.argmax(1)].numpy() == text.ids[:, 0] for one in texts for text, ours in log_probs(small, [one])]
    return float(np.concatenate(same).mean())


def batches(texts: Sequence[Text], seed: int) -> Iterator[list[Text]]:
    """Yield all texts once in random order, grouped by length."""
    rng = np.random.default_rng(seed)
    parts: list[list[Text]] = [[]]
    for text in sorted(texts, key=lambda text: len(text.tokens) + 32 * rng.random()):
        if parts[-1] and (len(parts[-1]) + 1) * len(text.tokens) > BATCH_TOKENS:
            parts.append([])
        parts[-1].append(text)
    for at in rng.permutation(len(parts)).tolist():
        yield parts[at]


def learn(
    small: LlamaForCausalLM, texts: Sequence[Text], held: Sequence[Text], args: argparse.Namespace, progress: Progress
) -> None:
    """Train the layers, from the checkpoint if it exists; the learning rate falls linearly to zero."""
    weights = [weight for weight in small.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    checkpoint, steps, step = args.out / "checkpoint.pt", args.steps, 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        small.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    recent, epoch = 0.0, step
    order: Iterator[list[Text]] = iter(())
    while step < steps:
        if (batch := next(order, None)) is None:
            order, epoch = batches(texts, SEED + epoch), epoch + 1
            continue
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 50) * (1 - step / steps)
        loss = loss_of(small, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        recent = float(loss.detach()) if not recent else 0.95 * recent + 0.05 * float(loss.detach())
        progress.note(f"step {step} of {steps}, loss {recent:.3f}")
        if step % SAVED == 0 or step == steps:
            learned = {name: weight for name, weight in small.state_dict().items() if "layers" in name or "norm" in name}
            torch.save({"model": learned, "optimizer": optimizer.state_dict(), "step": step}, checkpoint.with_suffix(".partial"))
            checkpoint.with_suffix(".partial").replace(checkpoint)
            same = agreement(small, held)
            progress.say(f"step {step} of {steps}, loss {recent:.3f}, held out: {same:.3f} of the tokens as the model's")


def distill(args: argparse.Namespace) -> None:
    """Run the distillation from its last intermediate result to the finished draft model."""
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    name, args.model = args.model, find_files(args.model)
    tokenizer = load_tokenizer_alone(args.model)
    with Progress() as progress:
        progress.say("questions")
        trained = questions(sorted(args.corpus.glob("train-*.jsonl.gz")), tokenizer)
        pairs = list(islice(trained, args.answers + args.texts))
        unknown = islice(questions([args.corpus / "valid.jsonl.gz"], tokenizer), args.held_out)
        progress.say("answers")
        held = answer(args.out / "held_out.jsonl", [prompt for prompt, _ in unknown], False, args, progress)
        own = answer(args.out / "answers.jsonl", [prompt for prompt, _ in pairs[: args.answers]], True, args, progress)
        progress.say("the model's distributions")
        model = load_weights(args.model, training_dtype(), "sdpa").eval()
        others = pairs[args.answers :]
        texts = read(args.out / "texts", model, own + others, PROMPT_SHARE, progress)
        tested = read(args.out / "held_out", model, held, 0.0, progress)
        learned = sum(len(text.positions) for text in texts)
        drafted = None if args.vocabulary is None else likeliest(texts, args.vocabulary, model.config.vocab_size)
        small = draft_model(model, args.layers, drafted)
        progress.say(f"{learned} tokens to learn, of {len(own)} answers of the model and {len(others)} of the corpus")
        learn(small, texts, tested, args, progress)
        small.set_output_embeddings(model.lm_head)  # with all tokens, as transformers reads it
        small.tie_weights()
        small.to(torch.bfloat16).save_pretrained(args.out / "model")
        tokenizer.save_pretrained(args.out / "model")
        if name == PACKAGED and args.vocabulary is None:
            write_gguf(str(args.out / "model"), "q4_1", packaged_file(args.out), args.out / "model.gguf")
        progress.say(f"the draft model is in {args.out}")


if __name__ == "__main__":
    distill(arguments())
