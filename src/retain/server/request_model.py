"""The base of all objects in requests: strict types, and three kinds of fields.

A model declares the fields that the server honours. Its table of other fields (client_fields.toml) has those that are
accepted without effect and those that are refused for a reason. A field in neither is an error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from retain.server.client_fields import Accepted, FieldTable, Refused, read_field_tables

Text = TypeVar("Text")
Other = TypeVar("Other")
log = logging.getLogger(__name__)
ANNOTATIONS = ("title", "description", "default")  # of a JSON schema: they hold for all its alternatives
OTHER = "other"  # the tag of a member that declares no types: that of a type is in angle brackets
REFUSED_FIELD = "refused_field"  # the type of pydantic's error; its context has the name of the `field`


class StrictModel(BaseModel):
    """Base of the objects in a request: strict types, unknown fields are errors, and null is as good as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)
    other_fields: ClassVar[FieldTable] = {}

    def __init_subclass__(cls, other_fields: str | None = None, **config: Any) -> None:
        """`other_fields`: the table of the class in client_fields.toml; without one it has that of its base."""
        super().__init_subclass__(**config)
        cls.other_fields = cls.other_fields if other_fields is None else read_field_tables()[other_fields]

    @model_validator(mode="before")
    @classmethod
    def _keep_honoured_fields(cls, data: Any) -> Any:
        """Leave out nulls and accepted fields. Raise an error that names the first refused field.

        1.0 becomes the integer 1: JSON does not distinguish them.
        """
        if not isinstance(data, dict):
            return data
        honoured: dict[Any, Any] = {}
        accepted = []
        required = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        for name, value in ((name, _coerce_int(value)) for name, value in data.items()):
            rule = cls.other_fields.get(name)
            if value is None and name not in required:
                continue
            if rule is None:
                honoured[name] = value
            elif isinstance(rule, Accepted) and rule.allows(value):
                accepted.append(name)
            else:
                raise PydanticCustomError(REFUSED_FIELD, "{why}", {"why": refusal(rule), "field": name})
        if accepted:
            log.debug("%s: accepted without effect: %s", cls.__name__, ", ".join(accepted))
        return honoured

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add the accepted fields and nulls to the model's schema in /openapi.json."""
        json_schema = handler.resolve_ref_schema(handler(schema))
        properties = json_schema.setdefault("properties", {})
        for name, property_schema in properties.items():
            if name not in json_schema.get("required", ()):
                properties[name] = _allow_null(property_schema)
        for name, rule in cls.other_fields.items():
            if isinstance(rule, Accepted):
                values = {} if rule.values is None else {"enum": [*rule.values, None]}
                properties[name] = {**values, "description": rule.why}
        if cls.model_config.get("extra") == "forbid":
            json_schema["additionalProperties"] = {"type": "null"}
        return json_schema


class LeftOutModel(BaseModel):
    """Base of objects in a request that are left out whole, whatever fields they have."""

    model_config = ConfigDict(extra="ignore", strict=True)
    other_fields: ClassVar[FieldTable] = {}


def get_type(value: Any, default: str | None = None) -> str | None:
    """Return the `type` of an object of a request, JSON or validated; None if it is no text."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    kind = default if kind is None else kind
    return kind if isinstance(kind, str) else None


def tag_type(kind: str | None) -> str | None:
    """Return the tag of the member of a union that has a type."""
    return None if kind is None else f"<{kind}>"


@dataclass(frozen=True)
class ByType:
    """Annotation of a union of models: the member is the one whose field `type` may have the value's `type`.

    A member that declares no values of its `type` has the tag OTHER. `error_type` and `message` are those of the error
    for a value of no member. `get_tag`: selects the member of a value.
    """

    error_type: str
    message: str
    get_tag: Callable[[Any], str | None] = lambda value: tag_type(get_type(value))

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members: list[Any] = [
            Annotated[model, Tag(tag or OTHER)]
            for model in get_args(union)
            for tag in map(tag_type, get_args(model.model_fields["type"].annotation) or (None,))
        ]
        select = Discriminator(self.get_tag, custom_error_type=self.error_type, custom_error_message=self.message)
        return handler.generate_schema(Annotated[Union[tuple(members)], select])  # noqa: UP007 (made at run time)


def _tag_text(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<other>"


# A union of a text and something else, of which only one is named in errors.
TextOrOther = Annotated[Annotated[Text, Tag("<text>")] | Annotated[Other, Tag("<other>")], Discriminator(_tag_text)]
TextOr = TextOrOther[str, Other]


def refusal(rule: Accepted | Refused) -> str:
    """Return why a value of a field is refused, in words."""
    if isinstance(rule, Refused):
        return f"is not supported: {rule.why}"
    return f"only {' or '.join(map(json.dumps, rule.values or ()))} is supported: {rule.why}"


def _coerce_int(x: Any, depth: int = 2) -> Any:
    if isinstance(x, list) and depth:
        return [_coerce_int(y, depth - 1) for y in x]
    # No integer field takes more than 64 bits, and the JSON writer neither.
    return int(x) if isinstance(x, float) and abs(x) < 2**63 and x.is_integer() else x


def _allow_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    alternatives = schema.get("anyOf") or [{k: v for k, v in schema.items() if k not in ANNOTATIONS}]
    if {"type": "null"} in alternatives:
        return schema
    annotations = {k: v for k, v in schema.items() if k in ANNOTATIONS}
    return {"anyOf": [*alternatives, {"type": "null"}], **annotations}
