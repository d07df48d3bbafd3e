"""What a WebShop agent reads: page text, admissible actions and the prompt around them.

The slots are those of the original agent (task, recent steps, current page, admissible actions, the instruction for
this turn); the wording is short, because a small model on a CPU reads every word of it at every step.

``WebshopDialogue`` turns the pages of one episode into its prompts. The environment manager and the writer of
demonstrations both use it, so a model is fine-tuned on exactly the prompts it is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_system.memory import SimpleMemory

SEPARATOR = " [SEP] "
SEARCH_PLACEHOLDER = "<your query>"
MAX_PROMPT_CHARACTERS = 13_000

WEBSHOP_TEMPLATE_NO_HIS = """You are an expert shopping agent in WebShop.
Task: {task_description}
Page: {current_observation}
Possible actions: [
{available_actions}
]
Think step by step about the page in <think> </think>, then give one possible action in <action> </action>."""

WEBSHOP_TEMPLATE = """You are an expert shopping agent in WebShop.
Task: {task_description}
Steps taken: {step_count}. The last {history_length}:
{action_history}
Step {current_step} page: {current_observation}
Possible actions: [
{available_actions}
]
Think step by step about the page in <think> </think>, then give one possible action in <action> </action>."""


def extract_task(page: str) -> str:
    """The instruction on a start page: the third field, after the field ``Instruction:``.

    Raises:
        ValueError: the page does not look like a start page.
    """
    fields = page.split(SEPARATOR)
    if len(fields) < 3 or fields[1].strip() != "Instruction:":
        raise ValueError(f"a WebShop start page has its task after 'Instruction:', this one begins {page[:120]!r}")
    return fields[2]


def format_observation(page: str, task: str) -> str:
    """The fields of ``page`` after the task, each in single quotes; a page without the task stays as it is."""
    fields = page.split(SEPARATOR)
    if task not in fields:
        return page
    return SEPARATOR.join(f"'{field}'" for field in fields[fields.index(task) + 1 :])


def list_admissible_actions(available: Mapping[str, Any]) -> list[str]:
    """The actions that do something on a page, as the agent would write them.

    Args:
        available: ``{"has_search_bar": bool, "clickables": [str]}``. ``click[search]`` is left out: the shop lists the
            search button but clicking it changes nothing.

    Raises:
        ValueError: a key that is neither of the two.
    """
    unknown = set(available) - {"has_search_bar", "clickables"}
    if unknown:
        raise ValueError(f"available actions have the keys has_search_bar and clickables, not {sorted(unknown)}")
    search = [f"search[{SEARCH_PLACEHOLDER}]"] if available.get("has_search_bar") else []
    return search + [f"click[{text}]" for text in available.get("clickables", ()) if text != "search"]


def build_prompt(
    task: str,
    observation: str,
    admissible_actions: Sequence[str],
    history: str = "",
    history_count: int = 0,
    step_count: int = 0,
    max_characters: int = MAX_PROMPT_CHARACTERS,
) -> str:
    """One turn's prompt.

    Args:
        task: what to buy.
        observation: the current page as ``format_observation`` gives it.
        admissible_actions: from ``list_admissible_actions``.
        history: recent steps as ``SimpleMemory.fetch`` renders them; empty for the template without history.
        history_count: number of steps in ``history``.
        step_count: number of steps taken so far.
        max_characters: a prompt with history that is longer leaves the history out.
    """
    slots = {
        "task_description": task,
        "current_observation": observation,
        "available_actions": "\n".join(f"'{action}'," for action in admissible_actions),
    }
    if history_count:
        prompt = WEBSHOP_TEMPLATE.format(
            step_count=step_count,
            history_length=history_count,
            action_history=history,
            current_step=step_count + 1,
            **slots,
        )
        if len(prompt) <= max_characters:
            return prompt
    return WEBSHOP_TEMPLATE_NO_HIS.format(**slots)


class WebshopDialogue:
    """One episode as its agent reads it: start page in, prompt out; action and next page in, next prompt out.

    Args:
        history_length: how many recent (page, action) pairs a prompt shows; 0 or less shows none.
        max_characters: a prompt with history that is longer leaves the history out.

    Attributes:
        task: the instruction of this episode.
        observation: the current page formatted for the prompt (also the anchor of step groups).
        admissible_actions: what can be done on the current page.
    """

    def __init__(self, history_length: int, max_characters: int = MAX_PROMPT_CHARACTERS) -> None:
        self._history_length = max(history_length, 0)
        self._max_characters = max_characters
        self._memory = SimpleMemory()
        self.task = ""
        self.observation = ""
        self.admissible_actions: list[str] = []

    def start(self, page: str, available: Mapping[str, Any]) -> str:
        """Begins an episode on its start page and returns the first prompt."""
        self._memory.reset(batch_size=1)
        self.task = extract_task(page)
        self._show(page, available)
        return self.prompt()

    def advance(self, action: str, page: str, available: Mapping[str, Any]) -> str:
        """Remembers ``action`` on the page that was current, moves to ``page`` and returns the next prompt."""
        self._memory.store({"text_obs": [self.observation], "action": [action]})
        self._show(page, available)
        return self.prompt()

    def prompt(self, history_length: int | None = None) -> str:
        """The prompt for the current page, with a shorter history where ``history_length`` asks for one."""
        wanted = self._history_length if history_length is None else min(history_length, self._history_length)
        steps = len(self._memory[0])
        if wanted <= 0 or steps == 0:
            return build_prompt(self.task, self.observation, self.admissible_actions)
        texts, counts = self._memory.fetch(wanted)
        return build_prompt(
            self.task, self.observation, self.admissible_actions, texts[0], counts[0], steps, self._max_characters
        )

    def _show(self, page: str, available: Mapping[str, Any]) -> None:
        self.observation = format_observation(page, self.task)
        self.admissible_actions = list_admissible_actions(available)
