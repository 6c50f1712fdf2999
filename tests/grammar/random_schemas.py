"""Random JSON schemas, from a small grammar of schemas."""

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c", "Ä b"])
SCALARS = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "minimum": 3, "exclusiveMaximum": 60},
        {"type": "number", "multipleOf": 0.5, "minimum": -2, "maximum": 4},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{1,4}-?$"},
        {"type": "string", "format": "date"},
        {"enum": ["x", 'y"z', 3, None, [1]]},
        {"const": {"k": [1, "é"]}},
        {"type": ["integer", "null"]},
        {"not": {"enum": ["x", "xy"]}, "type": "string", "maxLength": 3},
        {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]},
    ]
)


def _objects(inner):
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)},
        optional={
            "required": st.lists(NAMES, unique=True, max_size=2),
            "additionalProperties": st.one_of(st.just(False), inner),
            "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, unique=True, max_size=2), max_size=2),
            "not": st.fixed_dictionaries({"required": st.lists(NAMES, unique=True, min_size=1, max_size=2)}),
        },
    )


def _arrays(inner):
    return st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
        },
    )


def _composed(inner):
    options = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda parts: {"anyOf": parts}, options),
        st.builds(lambda parts: {"oneOf": parts}, options),
        st.builds(lambda parts: {"allOf": parts}, options),
        st.builds(lambda one, two, three: {"if": one, "then": two, "else": three}, inner, inner, inner),
    )


SCHEMAS = st.recursive(
    SCALARS, lambda inner: st.one_of(_objects(inner), _arrays(inner), _composed(inner)), max_leaves=5
)
