"""The embedded model's tokenizer, trained on demonstrations: a small byte-level BPE that reads shop pages cheaply.

Text is lower-cased, as the shop does with every action: copying a word from a title or a product code from a link is
then copying tokens. Numbers are split into groups of at most two digits, product codes are two tokens, and the
separators of the shop's pages and action lists are single tokens. Bytes are the base alphabet: any text encodes.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_system.environments.env_package.webshop.generator_vocabulary import ASIN_HEADS, ASIN_TAILS

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ["' [SEP] '", "',\n'click[", "'click[", "click[", "search[", "]"]
MARKERS += ["<think>", "</think>\n", "</think>", "<action>", "</action>"]
# A product code of a small generated catalogue is two tokens: what follows the first of them is hardly ever in doubt.
CODES = [f"b0{head.lower()}" for head in ASIN_HEADS] + [tail.lower() for tail in ASIN_TAILS]
# Other codes (B0 and eight letters) are cut into pairs.
CODE = r"[bB]0(?=[A-Za-z]{8})|" + "|".join(rf"(?<=[bB]0[A-Za-z]{{{n}}})[A-Za-z]{{2}}" for n in (0, 2, 4, 6))
WORDS = CODE + r"|\d{1,2}| ?\p{L}+|\s+| ?[^\s\p{L}\d]+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def texts(path: Path) -> Iterator[str]:
    """Prompts and responses of the demonstrations, and their words without the blank before them.

    A page shows a word after a quote, an answer repeats it after a blank or a bracket: with both forms in the
    vocabulary (and rows that start equal, see ``make_init``) either can be copied from the other.
    """
    for batch in pq.ParquetFile(path).iter_batches(columns=["prompt", "response"]):
        for prompt, response in zip(*(batch.column(i).to_pylist() for i in range(2))):
            yield prompt
            yield response
            yield "\n".join(re.findall(r"[^\W\d_]+", prompt))


def train(path: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``vocab_size`` entries with Qwen's chat markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS) - len(CODES),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts(path), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=True, special=False) for text in CODES])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
