"""Entry point of supervised fine-tuning: compose, check, train.

    python3 -m verl.trainer.fsdp_sft_trainer data.train_files=train.parquet model.path=folder
    torchrun --nproc-per-node 2 -m verl.trainer.fsdp_sft_trainer …

The trainer, whose imports take long, is in ``sft_trainer`` and imported after the checks.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.errors import ConfigError, several
from verl.trainer.config.sft_schema import SFTConfig, check_files, sft_config
from verl.trainer.config.tool import exit_code


@hydra.main(config_path="config", config_name="sft_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Hydra entry. Exit codes: 0 = done, 1 = it failed, 2 = the configuration cannot work, 130 = Ctrl-C."""
    stopped = "Stopped; the same command goes on from the newest checkpoint (trainer.save_freq)."
    sys.exit(exit_code(lambda: _train(_checked(config)), stopped))


def _checked(config: DictConfig) -> SFTConfig:
    """The typed configuration; ConfigError where it cannot work."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} to be set")
    tree = OmegaConf.to_container(config, resolve=True)
    assert isinstance(tree, dict)
    try:
        typed = sft_config(tree)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if problems := list(check_files(typed)):
        raise ConfigError(several(problems))
    return typed


def _train(config: SFTConfig) -> None:
    from verl.trainer.sft_trainer import SFTTrainer

    SFTTrainer(config).fit()


if __name__ == "__main__":
    main()
