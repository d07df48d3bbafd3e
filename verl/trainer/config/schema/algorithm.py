"""``algorithm``: advantages, KL in the reward, group filtering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.trainer.config.schema.actor import KLKind
from verl.trainer.config.schema.node import ConfigNode

GroupNormMode = Literal["mean_norm", "mean_std_norm"]


@dataclass(frozen=True, kw_only=True)
class KLControlConfig(ConfigNode):
    """Coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"]
    kl_coef: float
    horizon: int
    target_kl: float


@dataclass(frozen=True, kw_only=True)
class PFPPOConfig(ConfigNode):
    """Resampling of rows by score."""

    reweight_method: Literal["pow", "max_min", "max_random"]
    weight_pow: float


@dataclass(frozen=True, kw_only=True)
class GiGPOConfig(ConfigNode):
    """Step advantages within groups of equal (or similar) anchor observations."""

    step_advantage_w: float
    mode: GroupNormMode
    enable_similarity: bool
    similarity_thresh: float


@dataclass(frozen=True, kw_only=True)
class HGPOConfig(ConfigNode):
    """Step advantages within groups of equal observation history."""

    alpha: float
    mode: GroupNormMode
    episode_advantage_w: float
    history_length: int
    as_published: bool


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig(ConfigNode):
    """Resampling of groups whose episodes all got the same reward (DAPO)."""

    enable: bool
    max_num_gen_batches: int
    surplus: Literal["cut", "carry"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(ConfigNode):
    """From rewards to advantages."""

    gamma: float
    lam: float
    adv_estimator: str
    norm_adv_by_std_in_grpo: bool
    compute_mean_std_cross_steps: bool
    use_kl_in_reward: bool
    kl_penalty: KLKind
    kl_ctrl: KLControlConfig
    use_pf_ppo: bool
    pf_ppo: PFPPOConfig
    gigpo: GiGPOConfig
    hgpo: HGPOConfig
    filter_groups: FilterGroupsConfig
