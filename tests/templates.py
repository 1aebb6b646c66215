"""Small chat templates that make the demands of well-known models', written for these tests.

Each has its model's marks, its form of calls and results, and what it refuses; no more.
"""

from __future__ import annotations

ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

LLAMA31 = """\
{%- for m in messages %}
{{- '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end_header_id|>\n\n' }}
{%- if tools and loop.first and m.role != 'system' %}
{{- 'Answer {"name": function, "parameters": its arguments}.\n' }}
{%- for t in tools %}{{ (t | tojson) ~ '\n' }}{% endfor %}
{%- elif tools and loop.first and messages | length < 2 %}
{{- raise_exception('there is no user to tell of tools') }}
{%- elif tools and loop.first %}
{{- 'Answer {"name": function, "parameters": its arguments}.\n' }}
{%- for t in tools %}{{ (t | tojson) ~ '\n' }}{% endfor %}
{%- endif %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '{"name": "' ~ f.name ~ '", "parameters": ' ~ (f.arguments | tojson) ~ '}' }}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}
{%- else %}{{ m.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""


def _mistral(space: str) -> str:
    """Version 3 writes spaces around its marks, Nemo none."""
    return (
        """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if system else messages %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set turn = namespace(user=true) %}
{%- for m in rest if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is undefined) %}
{%- if (m.role == 'user') != turn.user %}{{ raise_exception('turns must alternate') }}{% endif %}
{%- set turn.user = not turn.user %}
{%- endfor %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}
{{- '[AVAILABLE_TOOLS]_' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]_' ~ (system ~ '\n\n' if system and m == users[-1] else '') ~ m.content ~ '[/INST]' }}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS]_[' }}
{%- for c in m.tool_calls %}
{%- if c.id is undefined or c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}
{%- endif %}
{{- (c.function | tojson)[:-1] ~ ', "id": "' ~ c.id ~ '"}' ~ ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']</s>' }}
{%- elif m.role == 'assistant' %}{{ '_' ~ m.content ~ '</s>' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}
{{- raise_exception('ids have nine letters') }}
{%- endif %}
{{- '[TOOL_RESULTS]_{"content": ' ~ (m.content | tojson) ~ ', "call_id": "' ~ m.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user and assistant, and a first system message') }}{% endif %}
{%- endfor %}
""".replace("_'", f"{space}'")
        .replace("]_[", f"]{space}[")
        .replace("]_{", f"]{space}{{")
    )


MISTRAL_V3, MISTRAL_NEMO = _mistral(" "), _mistral("")


def _mistral_small(identifier: str) -> str:
    """Later versions write a mark before each call, and only its arguments as JSON."""
    begun, _, rest = MISTRAL_NEMO.partition("{{- '[TOOL_CALLS][' }}\n")
    written = f"""\
{{{{- '[TOOL_CALLS]' ~ c.function.name ~ {identifier}'[ARGS]' ~ (c.function.arguments | tojson) }}}}
"""
    lines = [line for line in rest.splitlines(keepends=True) if "c.function | tojson" not in line]
    rest = "".join(lines).replace("{%- endif %}\n", "{%- endif %}\n" + written, 1)
    return begun + rest.replace("']</s>'", "'</s>'")


MISTRAL_SMALL, DEVSTRAL = _mistral_small("'[CALL_ID]' ~ c.id ~ "), _mistral_small("")

QWEN25 = (
    """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.' }}
{%- else %}{{ '<|im_start|>system\n' + messages[0].content }}{% endif %}
{%- for t in tools or [] %}{{ '\n<tools>' ~ (t | tojson) ~ '</tools> <tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{%- set f = c.function if c.function is defined else c %}
{{- '\n<tool_call>\n{"name": "' ~ f.name ~ '", "arguments": ' ~ (f.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
"""
    + ASK
)
QWEN3 = (
    QWEN25.replace(
        "(f.arguments | tojson)",
        "(f.arguments if f.arguments is string else f.arguments | tojson)",
    ).replace("+ m.content }}", "+ m.content.split('</think>')[-1].lstrip('\n') }}")
    + "{% if add_generation_prompt and enable_thinking is false %}"
    "{{ '<think></think>' }}{% endif %}"
)
HERMES = (
    """\
{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for t in tools %}
{%- set f = t.function %}
{{- '\n' + f.name + ' - ' + f.description + ': ' }}
{%- for name, of in f.parameters.properties | items %}{{ name + ' ' + of.type + ' ' }}{% endfor %}
{%- endfor %}
{{- '\nWrite <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls is defined %}
{{- '<|im_start|>assistant' }}
{%- for c in m.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>tool\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
"""
    + ASK
)
QWEN3_CODER = (
    """\
{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for t in tools %}{{ '\n<function>\n<name>' ~ t.function.name ~ '</name>' }}
{%- for name, of in t.function.parameters.properties | items %}
{{- '<parameter><name>' ~ name ~ '</name><type>' ~ (of.type | string) ~ '</type></parameter>' }}
{%- endfor %}{{ '</function>' }}{% endfor %}
{{- '\nWrite\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>' }}
{{- '\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for key, value in c.function.arguments | items %}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) }}
{{- '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
"""
    + ASK
)
GLM45 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\n<tools>' }}
{%- for t in tools %}{{ '\n' ~ (t | tojson(ensure_ascii=False)) }}{% endfor %}
{{- '\n</tools>\n<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n' }}
{{- '</tool_call>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|observation|>\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
{%- else %}
{{- '<|' ~ m.role ~ '|>\n' ~ m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>' ~ c.function.name ~ '\n' }}
{%- for key, value in c.function.arguments.items() %}
{{- '<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' }}
{{- (value if value is string else value | tojson) ~ '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
LLAMA4_PYTHON = """\
{%- for m in messages %}
{{- '<|header_start|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|header_end|>\n\n' }}
{%- if tools and loop.first %}
{{- 'Call functions as [func_name1(params_name1=params_value1), func_name2(params)].\n' }}
{%- for t in tools %}{{ (t | tojson) ~ '\n' }}{% endfor %}
{%- endif %}
{%- if m.tool_calls %}
{{- '[' }}
{%- for c in m.tool_calls %}
{{- c.function.name ~ '(' }}
{%- for key, value in c.function.arguments | items %}
{{- key ~ '=' ~ (value | tojson) ~ ('' if loop.last else ', ') }}
{%- endfor %}
{{- ')' ~ ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' }}
{%- else %}{{ m.content | trim }}{% endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}
"""
PHI4_MINI = """\
{%- for m in messages %}
{{- '<|' + m.role + '|>' + m.content }}
{%- if m.role == 'system' and 'tools' in m %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def _gemma(*, system: bool) -> str:
    """Gemma 3 puts a system message before the first question, Gemma 2 refuses it."""
    first = "messages[0].content ~ '\n\n'" if system else "raise_exception('no system role')"
    return """\
{%- if messages[0].role == 'system' %}
{%- set told = FIRST %}{% set rest = messages[1:] %}
{%- else %}{% set told = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}
{{- (told if loop.first else '') }}
{%- if m.content is string %}{{ m.content | trim }}
{%- else %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}
{{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
""".replace("FIRST", first)


GEMMA2, GEMMA3 = _gemma(system=False), _gemma(system=True)

SMOLLM2 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + ASK
)
SMOLLM3 = (
    """\
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if xml_tools %}
{{- '\nTools, to be called within <tool_call></tool_call>:\n<tools>\n' }}
{%- for t in xml_tools[:] %}{{ (t | string) ~ '\n' }}{% endfor %}{{ '</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages if m.role != 'system' %}
{{- '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' }}
{{- (m.content if m.content is string else '') ~ '<|im_end|>\n' }}
{%- endfor %}
"""
    + ASK
)
ARGUMENTS_AS_TEXT = (
    """\
{%- for t in tools or [] %}{{ t.function.name ~ '\n' }}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
"""
    + ASK
)
PARTS_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + ASK
)

TOOL_TEMPLATES = {
    "llama31": LLAMA31,
    "mistral-v3": MISTRAL_V3,
    "mistral-nemo": MISTRAL_NEMO,
    "mistral-small": MISTRAL_SMALL,
    "devstral": DEVSTRAL,
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "hermes": HERMES,
    "qwen3-coder": QWEN3_CODER,
    "glm45": GLM45,
    "llama4-python": LLAMA4_PYTHON,
    "phi4-mini": PHI4_MINI,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "smollm2": SMOLLM2,
    "smollm3": SMOLLM3,
    "arguments-as-text": ARGUMENTS_AS_TEXT,
    "parts-only": PARTS_ONLY,
}
