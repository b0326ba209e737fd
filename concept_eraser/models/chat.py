"""The text that Qwen 3 gets for a prompt, as the pipelines of Z-Image and Flux.2 Klein write it.

These pipelines render the chat template of the tokenizer, a program in Jinja. A checkpoint's own
template is never run: `use_own_template` replaces it. For one message of a user it gives the same
text as the template that Qwen 3 was published with.
"""

from __future__ import annotations

from typing import Any

BEFORE = "<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
NOT_THINKING = "<think>\n\n</think>\n\n"  # with enable_thinking=False
_TEMPLATE = (
    r"{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    r"'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    r"{% if enable_thinking is defined and enable_thinking is false %}"
    r"{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def use_own_template(tokenizer: Any) -> None:
    """Replace a tokenizer's chat template, which may be a stranger's program."""
    tokenizer.chat_template = _TEMPLATE
