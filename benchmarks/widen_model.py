"""Widen a small Qwen2 model to the cost of a real one, without changing what it computes.

    python3 -m benchmarks.widen_model OUTPUT                  # the embedded model at Qwen2.5-1.5B's size, bfloat16
    python3 -m benchmarks.widen_model OUTPUT --small FOLDER --layers 12
    python3 -m benchmarks.widen_model OUTPUT --device cuda    # compare on the GPU, in seconds

A benchmark of the whole training step needs episodes of realistic length, which random weights do not play, and the
cost of a real model, which the embedded one does not have. The wide model has both: it shops word for word as the small
one does, and every layer, head, unit and vocabulary row is computed as in any model of its shape.
:mod:`benchmarks.widening` says how.

The tool holds the wide model against the small one on pages of the shop and prints the gaps. At the default shape it
takes 8 GB of memory and, on two CPU cores, a few minutes.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from benchmarks.widening import UNUSED_MARGIN, Widening, WideShape, check_shapes
from verl.utils.fs import copy_to_local, open_to_readers
from verl.utils.tokenizer import hf_tokenizer

logger = logging.getLogger("benchmarks.widen_model")

EMBEDDED_MODEL = "pkg://agent_system.environments.env_package.webshop/embedded_model"
COMPARED_POSITIONS = 64
MEASURED_PROMPTS = 12


@torch.no_grad()
def unused_reach(model: Qwen2ForCausalLM, prompts: Sequence[torch.Tensor]) -> float:
    """What the logits of unused rows have to make up for: see :class:`Widening`, ``reach``."""
    seen: list[torch.Tensor] = []

    def record(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        seen.append((arguments[0].float().pow(2).mean(-1) + model.config.rms_norm_eps).sqrt())

    hook = model.model.norm.register_forward_pre_hook(record)
    needed = []
    for prompt in prompts:
        best = model(prompt[None].to(model.device)).logits.float().amax(-1)  # (1, positions), as is seen[-1]
        needed.append(((UNUSED_MARGIN - best).clamp(min=1.0) * seen[-1]).max())
    hook.remove()
    return float(torch.stack(needed).max())


def widen(
    small: Qwen2ForCausalLM, shape: WideShape, prompts: Sequence[torch.Tensor], seed: int = 0
) -> Qwen2ForCausalLM:
    """The wide model in float32 on the CPU; ``prompts`` are token ids, on which unused vocabulary rows are measured."""
    weights = {name: value.detach().float().cpu() for name, value in small.state_dict().items()}
    plan = Widening(small.config, weights, shape, unused_reach(small, prompts), seed)
    config = plan.config()
    with torch.device("meta"):
        wide = Qwen2ForCausalLM(config)
    wide.load_state_dict(dict(plan.tensors()), strict=False, assign=True)
    wide.tie_weights()
    wide.model.rotary_emb = Qwen2RotaryEmbedding(config)
    left = [name for name, value in (*wide.named_parameters(), *wide.named_buffers()) if value.is_meta]
    assert not left, left
    wide.generation_config = copy.deepcopy(small.generation_config)
    return wide.eval()


@dataclass(frozen=True)
class Agreement:
    """How a wide model stands to the small one.

    ``largest`` and ``mean`` are gaps of log-probabilities over all tokens of the small vocabulary, ``chosen`` the
    largest gap of the most likely token; ``margin`` is the least distance between the best logit and that of a
    vocabulary row without a token.
    """

    largest: float
    mean: float
    chosen: float
    margin: float
    same_texts: int
    texts: int


@torch.no_grad()
def compare(
    small: Qwen2ForCausalLM, wide: Qwen2ForCausalLM, prompts: Sequence[torch.Tensor], tokens: int = 24
) -> Agreement:
    """Log-probabilities at the last positions of each prompt, and greedy continuations of ``tokens`` tokens."""
    used = small.config.vocab_size
    gaps, chosen, margins, same = [], [], [], 0
    for prompt in prompts:
        (ours, text), (theirs, wide_text) = (_play(model, prompt, tokens) for model in (small, wide))
        wanted = ours.log_softmax(-1)  # (positions, vocabulary)
        gap = (wanted - theirs.log_softmax(-1)[:, :used]).abs()
        gaps.append(gap)
        chosen.append(gap.gather(1, wanted.argmax(-1, keepdim=True)))
        if theirs.shape[1] > used:
            margins.append(theirs[:, :used].amax(-1) - theirs[:, used:].amax(-1))
        same += text == wide_text
    every = torch.cat(gaps)
    return Agreement(
        largest=float(every.max()),
        mean=float(every.mean()),
        chosen=float(torch.cat(chosen).max()),
        margin=float(torch.cat(margins).min()) if margins else math.inf,
        same_texts=same,
        texts=len(prompts),
    )


def _play(model: Qwen2ForCausalLM, prompt: torch.Tensor, tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Logits at the prompt's last positions, in float32 on the CPU, and ``tokens`` greedy tokens after it."""
    output = model(prompt[None].to(model.device), logits_to_keep=COMPARED_POSITIONS, use_cache=True)
    logits, text = output.logits[0].float().cpu(), []
    while len(text) < tokens:
        choice = output.logits[:, -1:].argmax(-1)  # (1, 1)
        text.append(int(choice))
        output = model(choice, past_key_values=output.past_key_values, use_cache=True)
    return logits, text


def shop_prompts(tokenizer: object, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Token ids of pages that the scripted shopper comes by, one from each of ``count`` validation tasks.

    The first is the page that an episode starts with, which is short.
    """
    from agent_system.environments.env_package.webshop.demonstrations import play_episode
    from agent_system.environments.env_package.webshop.expert import ScriptedExpert
    from agent_system.environments.env_package.webshop.session import ShopSession, load_shop

    session = ShopSession(load_shop({"data_dir": None}))
    prompts = []
    for goal in range(count):
        steps = play_episode(session, goal, ScriptedExpert(seed + goal))
        message = {"role": "user", "content": steps[goal % len(steps)][0]}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        prompts.append(torch.from_numpy(np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)))
    return prompts


def save(wide: Qwen2ForCausalLM, small_folder: Path, output: Path) -> None:
    """Write config, weights, tokenizer and generation config; the folder appears when it is complete."""
    part = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        wide.save_pretrained(part, max_shard_size="1GB")
        for file in small_folder.iterdir():
            if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name != "config.json":
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, part / file.name)
        open_to_readers(part)
        os.rename(part, output)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _report(name: str, agreement: Agreement) -> None:
    print(
        f"{name:<10} largest gap {agreement.largest:.2e}  mean {agreement.mean:.2e}  of the best token "
        f"{agreement.chosen:.2e}  unused rows {agreement.margin:.0f} below the best  "
        f"same greedy text {agreement.same_texts}/{agreement.texts}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write; must not exist")
    parser.add_argument("--small", default=EMBEDDED_MODEL, help="folder of the small model (default: the embedded one)")
    for name, value in vars(WideShape()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu", help="where the two models are compared")
    parser.add_argument("--prompts", type=int, default=3, help="pages of the shop to compare on; 0 compares nothing")
    parser.add_argument("--tokens", type=int, default=24, help="greedy tokens to compare after each page")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.output.exists():
        raise ValueError(f"{options.output} exists already; give a folder that does not")
    folder = Path(copy_to_local(options.small, key="--small", hub=False))
    shape = WideShape(**{name: getattr(options, name) for name in vars(WideShape())})
    small = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    check_shapes(small.config, shape)
    prompts = shop_prompts(hf_tokenizer(str(folder)), max(options.prompts, MEASURED_PROMPTS))
    wide = widen(small, shape, prompts, options.seed)
    small.to(options.device)
    if options.prompts:
        _report("float32", compare(small, wide.to(options.device), prompts[: options.prompts], options.tokens))
    wide = wide.to(getattr(torch, options.dtype)).cpu()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save(wide, folder, options.output)
    count = sum(parameter.numel() for parameter in wide.parameters())
    print(f"{options.output}: {count / 1e6:,.0f} million parameters in {options.dtype}", flush=True)
    del wide
    if options.prompts and options.dtype != "float32":
        written = Qwen2ForCausalLM.from_pretrained(options.output, dtype=options.dtype).eval().to(options.device)
        _report(options.dtype, compare(small, written, prompts[: options.prompts], options.tokens))


if __name__ == "__main__":
    main()
