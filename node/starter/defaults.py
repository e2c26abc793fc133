"""What a new devnet trains on and how, unless its founder says otherwise. Chosen by experiment for the starter model.

The recipe's fractions are in millionths, its learning rate in 10⁻¹² (``protocol.domain.Recipe``).
"""

from __future__ import annotations

import json

from protocol.domain import Recipe, Task

RECIPE = Recipe(
    async_level=2,
    group_size=16,
    groups_per_submission=8,
    groups_per_step=64,
    max_prompt_tokens=64,
    max_response_tokens=5,
    temperature=1_000_000,
    min_p=0,
    clip_low=200_000,
    clip_high=200_000,
    clip_max=4_000_000,
    importance_max=2_000_000,
    learning_rate=300_000_000,
    warmup_steps=5,
    weight_decay=0,
    grad_clip=1_000_000,
    entropy=0,
    kl=0,
    inner_steps=4,
    normalisation="token",
    target_lengths=(),
    length_penalty=300,
    budget_prompt="Think for {} tokens before giving a response.",
)

TASKS = (
    Task(
        kind="reasoning-gym",
        name="chain_sum",
        weight=1,
        parameters=json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
        version="0.1.25",
        data=None,
    ),
)
