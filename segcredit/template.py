"""A prompt of one's own for models that know no chat: text with ``{question}`` in it."""

from collections.abc import Sequence

from segcredit.types import Prompt

QUESTION = "{question}"
"""Where the question goes. Nothing else in braces means anything: questions are untrusted."""


def check_template(template: str) -> str:
    """The template, if it has exactly one place for the question."""
    if (count := template.count(QUESTION)) != 1:
        raise ValueError(
            f"a template holds {QUESTION} exactly once, as in 'Problem: {QUESTION} Solution:'; "
            f"got it {count} times in {template!r}."
        )
    return template


def fill_template(template: str, prompt: Prompt) -> str:
    """The template with the prompt's question in its place."""
    check_questions([prompt])
    before, after = check_template(template).split(QUESTION)
    return before + prompt.messages[0]["content"] + after


def is_question(prompt: Prompt) -> bool:
    """Whether a template can ask it: one message of text."""
    return not prompt.images and len(prompt.messages) == 1


def check_questions(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that are more than a question of text, all in one message."""
    more = [prompt for prompt in prompts if not is_question(prompt)]
    if not more:
        return
    first = more[0]
    holds = "pictures" if first.images else f"{len(first.messages)} messages"
    which = f"{len(more)} of {len(prompts)} prompts hold" if len(prompts) > 1 else "it holds"
    raise ValueError(
        f"a template is for one message of text, but {which} more: prompt {first.id!r} has "
        f"{holds}. Leave the template out (data.template, --template), and the model's own chat "
        f"template is used; or leave out such rows."
    )
