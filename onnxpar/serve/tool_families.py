"""How models write calls of tools: a table of families of models, told apart by their chat
templates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFamily:
    """How models of a family write calls of tools. A call is a JSON object with `name` and
    `arguments` or `parameters`, a Python call with named arguments, or a name and then its
    arguments, as a JSON object or as texts. Several calls may be in a list.

    begins    markers before calls
    within    separators between the parts of a call
    ends      markers after calls
    is_bare   True if an answer may also begin with a call without a marker
    header    the pattern between a marker and the arguments, with the name as its group; empty:
              nothing is between them
    argument  for arguments whose values are texts: the marker before an argument, the pattern of
              its name and value, and the marker after it; None: arguments are JSON
    ids       the format of the ids of calls in prompts, from a `name` and the `number` of earlier
              calls; empty: any
    signs     texts in the chat templates of the family
    unless    texts in templates that have other calls between the same markers
    """

    begins: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_bare: bool = False
    header: str = ""
    argument: tuple[str, str, str] | None = None
    ids: str = ""
    signs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    @property
    def special(self) -> tuple[str, ...]:
        """All markers of the family, which may be special tokens of the tokenizer."""
        return (*self.begins, *self.within, *self.ends)

    def has(self, template: str) -> bool:
        """True for a chat template of a model of this family."""
        is_other = any(text in template for text in self.unless)
        return not is_other and any(sign in template for sign in self.signs)


BARE = ToolFamily(is_bare=True)
"""The family of calls without a marker."""
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK = ToolFamily(
    begins=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>"),
    within=(_SEPARATOR,),
    ends=("```", "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
    header=rf"(?:function{_SEPARATOR}([\w.-]+)\s*```json|([\w.-]+){_SEPARATOR})\s*",
    signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
)
_LLAMA = ToolFamily(
    begins=("<|python_tag|>", "<|python_start|>"),
    ends=(";", "<|python_end|>"),
    is_bare=True,
    signs=(
        *("<|python_tag|>", "<|python_start|>", '{"name": function name, "parameters":'),
        "[func_name1(params_name1=params_value1",
    ),
)
_TAGGED = ToolFamily(
    begins=("<tool_call>", "<|tool_call|>"),
    ends=("</tool_call>", "<|/tool_call|>"),
    signs=("<tool_call>", "<|tool_call|>"),
    unless=("<function=", "<arg_key>"),
)
_GLM = ToolFamily(
    begins=("<tool_call>",),
    within=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ends=("</tool_call>",),
    header=r"([\w.-]+)\s*",
    argument=("<arg_key>", r"([^<]+)</arg_key>\s*<arg_value>(.*)", "</arg_value>"),
    signs=("<arg_key>",),
)
_QWEN_CODER = ToolFamily(
    begins=("<tool_call>", "<function="),
    ends=("</function>", "</tool_call>"),
    header=r"([\w.-]+)>\s*",
    argument=("<parameter=", r"([^>]+)>\n?(.*?)\n?", "</parameter>"),
    signs=("<parameter=",),
    unless=("<seed:tool_call>",),
)
FAMILIES = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "mistral": ToolFamily(
        begins=("[TOOL_CALLS]",),
        within=("[CALL_ID]", "[ARGS]"),
        header=r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*",
        signs=("[TOOL_CALLS]",),
    ),
    "phi4_mini_json": ToolFamily(
        begins=("functools", "<|tool_call|>"), ends=("<|/tool_call|>",), signs=("<|tool|>",)
    ),
    "lfm2": ToolFamily(
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        signs=("<|tool_call_start|>", "<|tool_list_start|>"),
    ),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _LLAMA,
    "pythonic": _LLAMA,
    "granite": _TAGGED,
    "hermes": _TAGGED,
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
    "glm45": _GLM,
    "glm47": _GLM,
    "kimi_k2": ToolFamily(
        begins=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        within=("<|tool_call_argument_begin|>",),
        ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        header=r"(?:functions\.)?([\w.-]+):\d+\s*<\|tool_call_argument_begin\|>\s*",
        ids="functions.{name}:{number}",
        signs=("<|tool_calls_section_begin|>",),
    ),
}
"""The families by the names of vLLM's parsers."""


def family_of(template: str) -> ToolFamily | None:
    """Returns the family of models with this chat template; None if no family is known to have
    it."""
    return next((family for family in FAMILIES.values() if family.has(template)), None)
