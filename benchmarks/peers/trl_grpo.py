"""A GRPO step of Hugging Face TRL on a CPU, timed by phase.

Needs Python 3.11 with torch==2.13.0 trl==1.16.0 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0.
``benchmarks/peers/run.py`` starts it.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from importlib.metadata import version
from typing import Any

import common


def main() -> None:
    flags = common.step_parser(__doc__)
    flags.add_argument("--micro", type=int, help="samples of a micro-batch; all by default")
    flags.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = flags.parse_args()

    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    os.environ.update(TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    phases = common.Phases(args)
    batch = args.prompts * args.group
    micro = args.micro or batch
    vocab_size = common.model_settings(args.model_dir)["vocab_size"]
    prompts: list[str] = []
    for step in range(phases.num_steps):
        prompts += common.make_prompts(vocab_size, args.prompts, args.prompt_len, args.seed + step)
    lengths: list[int] = []

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        lengths.extend(len(text.split()) for text in completions)
        return [common.even_fraction(text) for text in completions]

    path = str(args.model_dir)
    trainer = GRPOTrainer(
        model=path,
        reward_funcs=[reward],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(path),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            fp16=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=args.seed,
            model_init_kwargs={"dtype": args.dtype, "attn_implementation": "sdpa"},
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=batch // micro,
            num_generations=args.group,
            max_completion_length=args.new_tokens,
            max_steps=phases.num_steps,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            beta=0.04,
            epsilon=0.2,
            loss_type="grpo",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            shuffle_dataset=False,
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=1.0,
            dataloader_pin_memory=False,
        ),
    )

    def scoring(model: Any, *_: Any, **__: Any) -> str | None:
        if model is trainer.ref_model:
            return "ref"
        return None if torch.is_grad_enabled() else "old"

    phases.wrap(trainer, "_generate", "rollout")
    phases.wrap(trainer, "_get_per_token_logps_and_entropies", scoring)
    phases.wrap(trainer, "_calculate_rewards", "verify")
    phases.wrap(trainer, "_prepare_inputs", "prepare")

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if phases.current is None:
                phases.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert phases.current is not None
            phases.add("update", phases.elapsed() - phases.current["prepare"])
            phases.end()
            if not phases.done:
                phases.begin()  # the data loader's time belongs to the next step

    trainer.add_callback(Steps())
    trainer.train()
    assert set(lengths) == {args.new_tokens}, f"answers of {sorted(set(lengths))} tokens"
    assert len(lengths) == len(phases.steps) * batch
    versions = {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")}
    common.report("trl", phases, versions, {"micro": micro, "threads": args.threads})


if __name__ == "__main__":
    main()
