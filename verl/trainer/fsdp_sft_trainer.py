"""Entry point of supervised fine-tuning: compose, check, train.

    python3 -m verl.trainer.fsdp_sft_trainer data.train_files=train.parquet model.path=folder
    torchrun --nproc-per-node 2 -m verl.trainer.fsdp_sft_trainer …

The trainer, whose imports take long, is in ``sft_trainer`` and imported after the checks.
"""

from __future__ import annotations

import os

from verl.trainer.config.folders import hold_run_folder, make_folder
from verl.trainer.config.sft_schema import SFTConfig, check
from verl.trainer.config.tool import tool_main


@tool_main(
    SFTConfig,
    "sft_trainer",
    stopped="Stopped; the same command goes on from the newest checkpoint (trainer.save_freq).",
)
def main(config: SFTConfig) -> None:
    """Fine-tune a model on rows of prompt and response; every key is in verl/trainer/config/sft_trainer.yaml."""
    check(config)
    if os.environ.get("RANK", "0") == "0":
        make_folder("trainer.default_local_dir", config.trainer.default_local_dir)
        hold_run_folder("trainer.default_local_dir", config.trainer.default_local_dir)
    from verl.trainer.sft_trainer import SFTTrainer

    SFTTrainer(config).fit()


if __name__ == "__main__":
    main()
