"""Names that settings choose from and that are registered elsewhere; a test keeps them equal to the registries."""

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "gigpo",
    "hgpo",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
GROUP_ESTIMATORS = ("grpo", "grpo_passk", "gigpo", "hgpo", "rloo", "reinforce_plus_plus_baseline")
ENVIRONMENTS = ("webshop",)
POLICY_LOSSES = ("vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "gpg")
TRACKERS = ("console", "wandb", "tensorboard", "mlflow", "swanlab", "clearml", "vemlp_wandb")
