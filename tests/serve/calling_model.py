"""A model that can call tools: a template for them, tools, and what the model may write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from serve.scripted_engine import FOLDER

TEMPLATE = """
{%- if tools %}<s>tools: {% for t in tools %}{{ t | tojson }}{% endfor %} write <tool_call></s>
{%- endif %}
{%- for m in messages %}<s>{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + ':' + c.function.arguments }}
{{- c.function.arguments.city }}{% endfor %}</s>{% endfor %}
{%- if add_generation_prompt %}<s>assistant:{% endif %}"""
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
FUNCTIONS: list[Any] = [
    {"name": "weather", "description": "of a city", "parameters": WEATHER},
    {"name": "now"},
]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]
"""As chats have them."""
ARGUMENTS = '{"city": "Paris", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
MALFORMED = '<tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>'


def calling_folder(folder: Path) -> Path:
    """Writes a tokenizer with the template; returns its folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
