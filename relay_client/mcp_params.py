"""Arguments that a tool wants mirrored in header fields: `x-mcp-header` of its inputSchema (SEP-2243). Pure.

Streamable HTTP 2026-07-28, "Custom Headers from Tool Parameters". A schema with an annotation that breaks a
rule there mirrors nothing: servers do not check such a tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from relay_client.mcp import encode_name
from relay_client.problem import NOT_JSON, parse_json

Path = tuple[str, ...]
Mirror = Mapping[Path, str]  # where an argument stands, and the name of its header field

_ANNOTATION = "x-mcp-header"
_PREFIX = "Mcp-Param-"
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, section 5.6.2
_TYPES = frozenset({"string", "integer", "boolean"})  # a number has no one text for all languages
# JSON Schema 2020-12: the keywords that hold further schemas; what else there is, is data.
_ONE = frozenset({
    "items", "contains", "unevaluatedItems", "additionalProperties", "propertyNames", "unevaluatedProperties",
    "not", "if", "then", "else", "contentSchema",
})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"patternProperties", "dependentSchemas", "$defs", "definitions"})


def mirrors_of(tools: Any) -> dict[str, Mirror]:
    """What each tool of a `tools/list` result wants mirrored; an entry for each tool that has a name."""
    listed = (tool for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else ()
    named = (tool for tool in listed if isinstance(tool.get("name"), str))
    return {tool["name"]: mirror_of(tool.get("inputSchema")) for tool in named}


def mirror_of(schema: Any) -> Mirror:
    """The arguments that a tool with this inputSchema wants mirrored."""
    mirror: dict[Path, str] = {}
    for path, position in _positions(schema):
        if _ANNOTATION not in position:
            continue
        name = position[_ANNOTATION]
        fits = isinstance(name, str) and _TOKEN.fullmatch(name) and _is_primitive(position.get("type"))
        if not path or not fits or name.lower() in {other.lower() for other in mirror.values()}:
            return {}
        mirror[path] = name
    return mirror


def mirrored_fields(mirror: Mirror, params: bytes) -> list[tuple[str, str]]:
    """The header fields of a call with these `params`; an argument that is absent or null has none."""
    if not mirror:
        return []
    call = parse_json(params)
    arguments = None if call is NOT_JSON or not isinstance(call, dict) else call.get("arguments")
    texts = ((name, _text_of(_at(arguments, path))) for path, name in mirror.items())
    return [(_PREFIX + name, encode_name(text)) for name, text in texts if text is not None]


def _is_primitive(kind: Any) -> bool:
    return isinstance(kind, str) and kind in _TYPES


def _positions(schema: Any) -> Iterator[tuple[Path | None, Mapping[str, Any]]]:
    """Every schema in it, with the chain of `properties` that leads there; None where something else does."""
    stack: list[tuple[Path | None, Any]] = [((), schema)]
    while stack:
        path, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield path, node
        for keyword, value in node.items():
            if keyword == "properties" and isinstance(value, dict):
                stack += [(None if path is None else (*path, name), part) for name, part in value.items()]
            elif keyword in _ONE:
                stack.append((None, value))
            elif keyword in _LISTS and isinstance(value, list):
                stack += [(None, part) for part in value]
            elif keyword in _MAPS and isinstance(value, dict):
                stack += [(None, part) for part in value.values()]


def _at(arguments: Any, path: Path) -> Any:
    for name in path:
        if not isinstance(arguments, dict):
            return None
        arguments = arguments.get(name)
    return arguments


def _text_of(value: Any) -> str | None:
    """The text of an argument; None for what has none (null, objects, arrays)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, str | int | float) else None
