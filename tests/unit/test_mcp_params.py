"""`x-mcp-header`: which arguments a tool wants mirrored, and in which words (SEP-2243)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.inbound import find_invalid_x_mcp_header, mcp_param_headers, x_mcp_header_map

from relay_client.mcp_params import mirror_of, mirrored_fields, mirrors_of


def marked(name="Region", kind="string", **more):
    """A property that wants to be mirrored."""
    return {"type": kind, "x-mcp-header": name, **more}


def schema(**properties):
    """An inputSchema."""
    return {"type": "object", "properties": properties}


def test_the_chain_of_properties_leads_to_an_argument():
    """At the top and nested; what is not marked is left out."""
    found = mirror_of(schema(a=marked("A"), b=schema(c=marked("C", "integer")), d={"type": "string"}))
    assert found == {("a",): "A", ("b", "c"): "C"}


@pytest.mark.parametrize(
    "broken",
    [
        schema(a=marked("two words")),
        schema(a=marked("")),
        schema(a=marked(7)),
        schema(a=marked(kind="number")),
        schema(a=marked(kind="array")),
        schema(a=marked(kind=["string", "null"])),
        schema(a={"x-mcp-header": "A"}),
        schema(a=marked("Same"), b=marked("same")),
        {**schema(), "x-mcp-header": "Root", "type": "string"},
        schema(a={"type": "array", "items": marked()}),
        schema(a={"anyOf": [marked()]}),
        {"$defs": {"a": marked()}, **schema(b=marked("B"))},
        schema(a={"items": schema(b=marked())}),
    ],
)
def test_one_broken_annotation_ends_them_all(broken):
    """The SDK says the same of each: such a tool mirrors nothing."""
    assert find_invalid_x_mcp_header(broken)
    assert mirror_of(broken) == {}


@pytest.mark.parametrize(
    "nothing", [None, [], "x", schema(), schema(a={"default": marked()}), {"properties": 1}]
)
def test_a_schema_without_annotations_mirrors_nothing(nothing):
    """Data that looks like one is none."""
    assert mirror_of(nothing) == {}


def test_each_tool_of_a_list_has_an_entry():
    """Also one without a schema; what has no name is passed over."""
    tools = [{"name": "a", "inputSchema": schema(x=marked())}, {"name": "b"}, {"name": 7}, "c"]
    assert mirrors_of(tools) == {"a": {("x",): "Region"}, "b": {}}
    assert mirrors_of(None) == {}


def fields(value, kind="string"):
    """The header fields of a call with this argument."""
    params = json.dumps({"name": "t", "arguments": {"a": value}}).encode()
    return mirrored_fields(mirror_of(schema(a=marked(kind=kind))), params)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("us-west1", "string", "us-west1"),
        ("K\u00f6ln", "string", "=?base64?S8O2bG4=?="),
        ("", "string", "=?base64??="),
        (True, "boolean", "true"),
        (False, "boolean", "false"),
        (42, "integer", "42"),
        (42.0, "integer", "42"),
        (10**500, "integer", "1" + "0" * 500),
        (-7, "integer", "-7"),
    ],
)
def test_an_arguments_text(value, kind, text):
    """As it is where that is safe in a header field, else as base64 of its UTF-8."""
    assert fields(value, kind) == [("Mcp-Param-Region", text)]


@pytest.mark.parametrize("value", [None, {}, [], {"b": 1}])
def test_what_has_no_text_has_no_field(value):
    """Null counts as absent."""
    assert fields(value) == []


@pytest.mark.parametrize("params", [b'{"name":"t"}', b'{"name":"t","arguments":[1]}', b"[]", b"no JSON"])
def test_absent_arguments_have_no_field(params):
    """Whatever the call looks like."""
    assert mirrored_fields({("a",): "A", ("a", "b"): "B"}, params) == []


VALUES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(min_size=1, max_size=20)
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), VALUES | st.dictionaries(st.sampled_from("xy"), VALUES))


@given(ARGUMENTS)
def test_the_sdk_mirrors_the_same(arguments):
    """Against the official SDK's own client."""
    asked = schema(a=marked("A"), b=marked("B", "integer"), c=schema(x=marked("X", "boolean"), y=marked("Y")))
    params = json.dumps({"name": "t", "arguments": arguments}).encode()
    assert dict(mirrored_fields(mirror_of(asked), params)) == mcp_param_headers(
        x_mcp_header_map(asked), arguments
    )
