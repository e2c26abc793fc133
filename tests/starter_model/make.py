"""Make the starter model: ``python -m tests.starter_model.make OUT`` writes configuration, tokenizer and weights.

The model is a Llama of 0.2 million parameters with a word-level tokenizer: the words of the admitted tasks' wording,
single digits and signs, so that a prompt has about seventeen tokens. It is warmed up by supervised learning on
reasoning-gym's own prompts, first with few wrong digits in the answers until it calculates well, then shortly with
many. What comes out can calculate better than it does: it samples the right answer about one time in three, though its
most likely answer is mostly right. That leaves reinforcement learning something to find, and something to find it with.

Weights are averaged over the updates, and the rate stays constant: a model that was cooled down into a sharp minimum
scores alike but falls apart at the first steps of reinforcement learning.

Seeded; about four minutes on one core. Equal torch, reasoning-gym and processor make equal bytes, others make a model
of the same kind. No part of the product: the copy in ``node/starter`` is the one that new domains start from.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional

from node.starter.defaults import TASKS
from node.workers.model import CausalLM, parameter_count
from node.workers.model_config import read_config
from node.workers.row_layout import RowGroup, chosen_by, pack

SEED = 1
BATCH = 128
LEARN_RATE, LEARN_SLIPS = 3e-3, 0.1
"""Learning rate and share of wrong digits while it learns to calculate."""
LEARN_UNTIL, LEARN_AT_MOST = 0.43, 3000
"""The probability of right answers at which that ends, looked at every 50 updates, and the most updates it takes."""
LOOSEN_RATE, LOOSEN_SLIPS, LOOSEN_UPDATES = 3e-4, 0.35, 120
"""The same for the end, which makes it less sure of what it knows."""
PROBE = 1024
"""Questions that progress is measured on."""
AVERAGE = 0.02
"""Share of each update in the averaged weights."""
ROW_SLOTS = 60

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
SIGNS = "+-*/=:.,?()^%"
# chain_sum, products, basic_arithmetic, gcd, lcm, decimal_chain_sum, fraction_simplification, number_sequence,
# count_bits
WORDS = """
State the final answer to following arithmetic problem Solve multiplication Give only result as your Calculate
Find Greatest Common Divisor GCD of these numbers Least Multiple LCM Simplify fraction its lowest terms simplified How
many bits are there in binary representation number what is next a an and your response
"""
VOCABULARY_SIZE = 96


def vocabulary() -> dict[str, int]:
    """Token → id. The special ones come first: padding 0, end 1, unknown 2."""
    tokens = [PAD, END, UNKNOWN, *"0123456789", *SIGNS, *WORDS.split()]
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def make_tokenizer() -> Tokenizer:
    """Words, single digits and single signs; a response decodes without spaces, so that "4", "2" reads "42"."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    return tokenizer


def make_config() -> dict[str, Any]:
    """The Hugging Face configuration."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


class Questions:
    """The prompts and right answers of the default tasks, as token ids."""

    def __init__(self, tokenizer: Tokenizer, generator: random.Random) -> None:
        import reasoning_gym  # three seconds and 100 MB that no other part of a torch process needs

        self._tokenizer = tokenizer
        self._generator = generator
        self._weights = [task.weight for task in TASKS]
        self._sets = [
            reasoning_gym.create_dataset(task.name, seed=SEED, size=2**31 - 1, **json.loads(task.parameters))
            for task in TASKS
        ]

    def draw(self) -> tuple[list[int], list[int]]:
        """A prompt and its right answer with the end token."""
        (chosen,) = self._generator.choices(self._sets, self._weights)
        item = chosen[self._generator.randrange(2**30)]
        answer = self._tokenizer.encode(item["answer"]).ids
        return self._tokenizer.encode(item["question"]).ids, [*answer, vocabulary()[END]]


def with_slips(answer: Sequence[int], share: float, generator: random.Random) -> list[int]:
    """``answer`` with each digit replaced by a random one with probability ``share``."""
    ids = vocabulary()
    digits = [ids[digit] for digit in "0123456789"]
    return [generator.choice(digits) if token in digits and generator.random() < share else token for token in answer]


def initialise(model: CausalLM) -> None:
    """Random weights: small embeddings, matrices that keep the variance of what passes through them."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 0.02 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
            torch.nn.init.normal_(parameter, 0.0, scale)


def answers_loss(model: CausalLM, batch: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens; the prompts' beginning that all share is computed once a row."""
    prompts = [prompt for prompt, _ in batch]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
    shared = min(shared, min(map(len, prompts)) - 1)
    group = RowGroup(prompts[0][:shared], [[*prompt[shared:], *answer] for prompt, answer in batch])
    (rows,) = pack([group], row_slots=shared + ROW_SLOTS, batch_slots=2**30)
    losses = functional.cross_entropy(model.logits(chosen_by(model, rows)), rows.targets, reduction="none")
    is_answer = [[0.0] * (len(prompt) - shared) + [1.0] * len(answer) for prompt, answer in batch]
    weights = torch.tensor([weight for line in is_answer for weight in line])
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def accuracy(model: CausalLM, batch: Sequence[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """The mean probability of right answers when sampled, and the share that the most likely tokens get right."""
    (rows,) = pack([RowGroup(prompt, [answer]) for prompt, answer in batch], batch_slots=2**30)
    logits = model.logits(chosen_by(model, rows))
    logs = torch.log_softmax(logits, dim=-1).gather(1, rows.targets[:, None])[:, 0]
    right = (logits.argmax(dim=-1) == rows.targets).float()
    sampled = torch.zeros(len(batch)).index_add_(0, rows.owners, logs).exp()
    greedy = torch.ones(len(batch)).scatter_reduce_(0, rows.owners, right, "amin")
    return sampled.mean().item(), greedy.mean().item()


class Teacher:
    """Supervised learning on answers with slips. ``average`` is the model with averaged weights."""

    def __init__(self, model: CausalLM, questions: Questions, generator: random.Random) -> None:
        self.model = model
        self.average = copy.deepcopy(model)
        self._questions = questions
        self._generator = generator
        self._probe = [questions.draw() for _ in range(PROBE)]

    def learn(self) -> None:
        """Learn to calculate, until the averaged model does so well enough; the model continues from the average."""
        optimizer = self._optimizer()
        for update in range(1, LEARN_AT_MOST + 1):
            loss = self._update(optimizer, LEARN_RATE * min(1.0, update / 50), LEARN_SLIPS)
            if update % 50 == 0 and self._report("learn", update, loss) >= LEARN_UNTIL:
                break
        self.model.load_state_dict(self.average.state_dict())

    def loosen(self) -> None:
        """Become less sure: more slips, and a small rate that falls to nothing."""
        optimizer = self._optimizer()
        self._generator.seed(SEED)  # so that this phase can be redone without the first
        for update in range(1, LOOSEN_UPDATES + 1):
            rate = LOOSEN_RATE * min(1.0, update / 20) * (1 - (update - 1) / LOOSEN_UPDATES)
            loss = self._update(optimizer, rate, LOOSEN_SLIPS)
        self.average.load_state_dict(self.model.state_dict())
        self._report("loosen", LOOSEN_UPDATES, loss)

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.05)

    def _update(self, optimizer: torch.optim.Optimizer, rate: float, slips: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = [self._questions.draw() for _ in range(BATCH)]
        loss = answers_loss(
            self.model, [(prompt, with_slips(answer, slips, self._generator)) for prompt, answer in batch]
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, AVERAGE)
        return loss.item()

    def _report(self, phase: str, update: int, loss: float) -> float:
        sampled, greedy = accuracy(self.average, self._probe)
        print(f"{phase} {update:5d}  loss {loss:.3f}  sampled {sampled:.3f}  greedy {greedy:.3f}", flush=True)
        return sampled


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: one argument, the directory to write."""
    parser = argparse.ArgumentParser(prog="python -m tests.starter_model.make", description="Make the starter model.")
    parser.add_argument("out", type=Path, help="the directory to write; it is made where it is missing")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    generator = random.Random(SEED)
    tokenizer = make_tokenizer()
    (out / "config.json").write_text(json.dumps(make_config(), indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    model = CausalLM(read_config(out / "config.json"))
    initialise(model)
    print(f"{parameter_count(model)} parameters, {len(vocabulary())} tokens of {VOCABULARY_SIZE}")
    questions = Questions(tokenizer, generator)
    teacher = Teacher(model, questions, generator)
    teacher.learn()
    teacher.loosen()
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


if __name__ == "__main__":
    main()
