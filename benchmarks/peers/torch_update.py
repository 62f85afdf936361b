"""Updates of a plain torch loop over a ``transformers`` model on a CPU: fine-tuning, or GRPO with a KL in the loss.

Needs Python 3.11 with torch==2.13.0 transformers==5.24.0. ``benchmarks/peers/turns.py`` starts it.
"""

from __future__ import annotations

import os
import warnings
from importlib.metadata import version
from typing import Any

import common
import numpy as np


def main() -> None:
    flags = common.update_parser(__doc__)
    flags.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = flags.parse_args()

    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.filterwarnings("ignore")
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    micro = args.micro or args.rows
    vocab_size = common.model_settings(args.model_dir)["vocab_size"]
    model = AutoModelForCausalLM.from_pretrained(
        str(args.model_dir), dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    targets = args.new_tokens if args.prompt_len else args.new_tokens - 1
    advantages = torch.tensor(np.where(np.arange(args.rows) % 2, 1.0, -1.0), dtype=torch.float32)

    def logprobs(rows: Any) -> Any:
        """float32[rows, targets], of the last ``targets`` tokens."""
        keep = {"logits_to_keep": targets + 1} if args.prompt_len else {}
        logits = model(input_ids=rows, use_cache=False, **keep).logits[:, :-1]
        nats = functional.cross_entropy(
            logits.reshape(-1, vocab_size).float(), rows[:, -targets:].reshape(-1), reduction="none"
        )
        return -nats.view(len(rows), targets)

    def loss(rows: Any, advantage: Any) -> Any:
        new = logprobs(rows)
        if args.update == "sft":
            return -new.sum() / (args.rows * targets)
        old = torch.full_like(new, -np.log(vocab_size))  # of the sampler, and of the reference
        ratio = torch.exp(new - old)
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
        kl = torch.exp(old - new) - (old - new) - 1
        return (0.04 * kl - gain).sum() / (args.rows * targets)

    versions = {name: version(name) for name in ("torch", "transformers")}
    for step in common.Turns(versions, {"micro": micro, "threads": args.threads}):
        rows = torch.tensor(common.random_rows(vocab_size, args, step))
        for part, advantage in zip(rows.split(micro), advantages.split(micro), strict=True):
            loss(part, advantage).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
