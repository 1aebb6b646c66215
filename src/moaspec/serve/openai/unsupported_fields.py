"""Unsupported request fields that would change the answer.

They are refused, unless their value is neutral. Other unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.schema import GenerationRequest

OFF = (False,)
EMPTY: tuple[Any, ...] = ("", [], {})

OPENAI: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "context_management": EMPTY,
    "conversation": EMPTY,
    "image": EMPTY,
    "modalities": (["text"],),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field names with their neutral values. Null and absent fields are neutral too."""

OTHER_SERVERS: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": EMPTY,
    "bad_words": EMPTY,
    "chat_template": (),
    "documents": EMPTY,
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": EMPTY,
    "guided_choice": EMPTY,
    "guided_grammar": EMPTY,
    "guided_json": (),
    "guided_regex": EMPTY,
    "ignore_eos": OFF,
    "json_schema": EMPTY,
    "length_penalty": (1,),
    "logits_processors": EMPTY,
    "min_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (),
    "num_beams": (1,),
    "stop_token_ids": EMPTY,
    "structured_outputs": EMPTY,
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": OFF,
    "xtc_probability": (0,),
}
"""Fields of vLLM and llama.cpp."""

OTHER_ENDPOINTS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "continue_final_message": OFF,
    "echo": OFF,
    "enable_thinking": (),
    "function_call": ("auto", "none"),
    "functions": EMPTY,
    "input": (),
    "instructions": EMPTY,
    "logprobs": (False, 0),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "messages": (),
    "n": (1,),
    "previous_response_id": EMPTY,
    "reasoning": EMPTY,
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": EMPTY,
    "text": EMPTY,
    "thinking": (),
    "tool_choice": ("auto", "none"),
    "tools": EMPTY,
}
"""Fields of another endpoint, and chat template variables outside `chat_template_kwargs`."""

NEUTRAL = {**OPENAI, **OTHER_SERVERS, **OTHER_ENDPOINTS}


def refuse_unsupported(body: GenerationRequest) -> None:
    """Refuse a request with an unsupported field.

    Raises:
        RequestError: names the field.
    """
    for name, value in (body.model_extra or {}).items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise RequestError(
                f"The field {name!r} is not supported at this endpoint, and it would change the "
                "answer. Leave it out.",
                param=name,
            )
