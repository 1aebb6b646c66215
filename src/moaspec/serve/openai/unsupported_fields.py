"""Unsupported request fields that would change the answer.

They are refused, unless their value is neutral. Other unknown fields are ignored.
"""

from importlib.resources import files
from typing import Any

import yaml

from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.schema import GenerationRequest

NEUTRAL: dict[str, list[Any]] = yaml.safe_load(
    files("moaspec.serve.openai").joinpath("unsupported_fields.yaml").read_text("utf-8")
)
"""Field names with their neutral values."""


def refuse_unsupported(body: GenerationRequest) -> None:
    """Refuse a request with an unsupported field, which the error names."""
    for name, value in (body.model_extra or {}).items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise RequestError(
                f"The field {name!r} is not supported at this endpoint, and it would change the "
                "answer. Leave it out.",
                param=name,
            )
