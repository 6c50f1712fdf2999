"""The options that a schema has in `x-guidance`, as a route of the server adds to them. Runs in the server's process."""

import msgspec

from headrace.grammar.schema_walk import Json, subschemas


def with_options(schema: Json, options: dict[str, Json]) -> Json:
    """The schema with these options, unless it has its own; what is no schema with options as it is."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict) or not isinstance(own := schema.get("x-guidance", {}), dict):
        return schema
    return {**schema, "x-guidance": options | own}


def with_one_of_as_any_of(schema: Json) -> Json:
    """A schema, or its JSON, whose `oneOf` is taken as `anyOf` where its options cannot be shown to exclude each other, unless it says otherwise.

    What is no JSON is given back, to be refused where it is read.
    """
    if isinstance(schema, str):
        if "oneOf" not in schema:
            return schema
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return schema
    if not any("oneOf" in part for _, part in subschemas(schema)):
        return schema
    return with_options(schema, {"coerce_one_of": True})
