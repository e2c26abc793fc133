"""TRL's GRPOTrainer on given completions: ``trl_side.py MODEL DATA THREADS``, one optimizer step a line of its input.

Runs in a virtual environment of its own with TRL, and imports nothing of this project. Every step's prompts,
completions and advantages come from DATA (JSON, see ``tests.bench.learning_trainer``), so that nothing is generated or
scored here. A line with the seconds of the step answers each line read.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def padded(lines: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask [B, longest]."""
    longest = max(map(len, lines))
    tokens = torch.zeros((len(lines), longest), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, line in enumerate(lines):
        where = slice(longest - len(line), longest) if left else slice(0, len(line))
        tokens[row, where] = torch.tensor(line)
        mask[row, where] = 1
    return tokens, mask


def main(model: str, data: str, threads: int) -> None:
    torch.set_num_threads(threads)
    with open(data, encoding="utf-8") as file:
        given = json.load(file)
    prompts = [prompt for prompt, group in zip(given["prompts"], given["groups"], strict=True) for _ in group]
    completions = [line for group in given["groups"] for line in group]
    advantages = torch.tensor([value for group in given["advantages"] for value in group])
    size = len(given["groups"][0])
    rows = given["micro_batch"]

    class Fed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            # Each is given as it is asked for, a generation batch being the whole optimizer step.
            prompt_ids, prompt_mask = padded(prompts, left=True)
            completion_ids, completion_mask = padded(completions, left=False)
            return {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": completion_ids,
                "completion_mask": completion_mask,
                "advantages": advantages,
                "num_items_in_batch": completion_mask.sum(),
            }

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        begun = cpu = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not sys.stdin.readline():
                sys.exit(0)
            self.begun, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found = {"seconds": time.perf_counter() - self.begun, "cpu": time.process_time() - self.cpu}
            print(json.dumps(found), file=answers, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(prompts) // rows,
            num_generations=size,
            max_completion_length=max(map(len, completions)),
            beta=0.0,
            num_iterations=1,
            epsilon=0.2,
            delta=4.0,
            learning_rate=given["learning_rate"],
            max_grad_norm=1.0,
            adam_beta1=0.9,
            adam_beta2=0.99,
            gradient_checkpointing=False,
            bf16=False,
            fp16=False,
            max_steps=1000,
            lr_scheduler_type="constant",
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{model}/tokenizer.json")
        tokenizer.eos_token_id = loaded.config.eos_token_id
        tokenizer.pad_token_id = loaded.config.eos_token_id
        trainer = Fed(
            model=loaded,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * len(given["prompts"])}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # the libraries print
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
