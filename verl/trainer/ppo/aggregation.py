"""From a loss per token to one number, exactly, however a mini-batch is cut.

A mini-batch is what one optimiser step sees: its rows lie on several ranks and pass through in several micro-batches. A
mean taken inside each micro-batch and then averaged gives tokens in short micro-batches a larger weight. So a loss
function here returns a matrix with one value per token, and the caller divides by counts of the *whole* mini-batch:

    counts = token_and_row_counts(masks of my rows)         # this rank
    all_reduce(counts)                                      # the mini-batch
    normaliser = LossNormalizer("token-mean", tokens, rows, response_length)
    for micro-batch: normaliser(loss_matrix, mask).backward()

The sum of these pieces over micro-batches and ranks equals `agg_loss` on the whole mini-batch. Data-parallel wrappers
that *average* gradients over ranks (DDP, FSDP) divide once more by the world size: multiply the piece by it first.

Rows without a single valid token (fillers that make the row count divisible) count nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from verl.utils.torch_functional import masked_sum

AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

# A metric travels as (sum, count), so that pieces from micro-batches and ranks add up to the true mean.
MetricSum = tuple[torch.Tensor, torch.Tensor]


@dataclass
class PolicyLossOutput:
    """What a policy loss gives back for one micro-batch.

    Attributes:
        loss: (rows, response_length) float, differentiable, one value per token; values at masked positions are
            ignored.
        metrics: name -> (sum, count), both 0-dim and detached; the mean over the mini-batch is sum of sums over sum of
            counts.
        agg_mode_override: an aggregation mode that this loss insists on, whatever `actor.loss_agg_mode` says (GSPO).

    Example with 2 rows of at most 3 tokens, the second one token long::

        PolicyLossOutput(
            loss=tensor([[0.1, 0.2, 0.3], [0.4, 0.0, 0.0]], grad_fn=...),
            metrics={"actor/pg_clipfrac": (tensor(1.0), tensor(4.0))},
            agg_mode_override=None,
        )
    """

    loss: torch.Tensor
    metrics: dict[str, MetricSum] = field(default_factory=dict)
    agg_mode_override: str | None = None


@dataclass(frozen=True)
class LossNormalizer:
    """Divides a micro-batch's summed loss by counts of the whole mini-batch (all ranks, all micro-batches).

    Attributes:
        mode: one of `AGGREGATION_MODES`.
        global_tokens: valid response tokens of the mini-batch.
        global_rows: rows of the mini-batch with at least one valid token.
        response_length: the constant that `seq-mean-token-sum-norm` divides by: `actor.loss_scale_factor`, or else
            `data.max_response_length`.
    """

    mode: str
    global_tokens: float
    global_rows: float
    response_length: float

    def __post_init__(self) -> None:
        check_mode(self.mode)

    def __call__(self, loss_mat: torch.Tensor, mask: torch.Tensor, mode: str | None = None) -> torch.Tensor:
        """This micro-batch's share of the mini-batch loss, 0-dim. `mode` overrides the configured one (GSPO)."""
        return aggregate(
            loss_mat,
            mask,
            mode or self.mode,
            global_tokens=self.global_tokens,
            global_rows=self.global_rows,
            response_length=self.response_length,
        )


def check_mode(mode: str) -> None:
    """Raise `ValueError` for an unknown aggregation mode."""
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"actor.loss_agg_mode={mode!r} is not known: use one of {', '.join(AGGREGATION_MODES)}")


def token_and_row_counts(mask: torch.Tensor) -> torch.Tensor:
    """(2,) float64: valid tokens and rows that have any, of a (rows, response_length) mask. Sum these over ranks."""
    tokens_of_row = mask.sum(dim=-1)
    return torch.stack([tokens_of_row.sum(), (tokens_of_row > 0).sum()]).to(torch.float64)


def metric_sum(values: torch.Tensor, mask: torch.Tensor) -> MetricSum:
    """(sum over valid tokens, number of valid tokens), detached: the mean over tokens in a form that adds up."""
    return masked_sum(values.detach().float(), mask), mask.detach().sum().float()


def aggregate(
    loss_mat: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    *,
    global_tokens: float,
    global_rows: float,
    response_length: float,
) -> torch.Tensor:
    """One micro-batch's share of the mini-batch loss.

    Args:
        loss_mat: (rows, length) loss per token.
        mask: (rows, length), 1 for valid response tokens.
        mode: `token-mean` weighs tokens alike; `seq-mean-token-sum` sums a row and weighs rows alike;
            `seq-mean-token-mean` averages within the row first; `seq-mean-token-sum-norm` divides the sum over all
            tokens by the constant `response_length` (Dr.GRPO, arXiv 2503.20783).
        global_tokens, global_rows: counts over the mini-batch, see `token_and_row_counts`.
        response_length: the constant of the last mode.

    Returns:
        0-dim tensor; summed over all micro-batches and ranks it is `agg_loss` of the mini-batch.
    """
    check_mode(mode)
    if mode == "token-mean":
        return masked_sum(loss_mat, mask) / max(global_tokens, 1.0)
    if mode == "seq-mean-token-sum":
        return masked_sum(loss_mat, mask) / max(global_rows, 1.0)
    if mode == "seq-mean-token-mean":
        mean_of_row = masked_sum(loss_mat, mask, axis=-1) / mask.sum(dim=-1).clamp(min=1)  # (rows,)
        return mean_of_row.sum() / max(global_rows, 1.0)
    return masked_sum(loss_mat, mask) / response_length


def agg_loss(
    loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str, response_length: float | None = None
) -> torch.Tensor:
    """The loss of a batch that is all here: `aggregate` with the batch's own counts.

    Args:
        loss_mat: (rows, length) loss per token.
        loss_mask: (rows, length), 1 for valid response tokens.
        loss_agg_mode: one of `AGGREGATION_MODES`.
        response_length: divisor of `seq-mean-token-sum-norm`; None takes the matrix's width.

    Raises:
        ValueError: unknown mode.
    """
    tokens, rows = token_and_row_counts(loss_mask).tolist()
    return aggregate(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        global_tokens=tokens,
        global_rows=rows,
        response_length=response_length or loss_mat.shape[-1],
    )
