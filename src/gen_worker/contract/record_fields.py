"""The fields of a record's type, found out once: msgspec evaluates all annotations again with every call."""

import functools

import msgspec


@functools.cache
def record_fields(record: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """`msgspec.structs.fields` of the type."""
    return msgspec.structs.fields(record)
