import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gen_worker.contract.document_schema import convert_document, nearest_name
from gen_worker.contract.documents import (
    MAX_CHARS,
    MAX_DEPTH,
    MAX_FAULTS_SHOWN,
    Format,
    parse_document,
    read_document,
    render_path,
    render_value,
    require_plain,
)
from gen_worker.errors import SpecError

FORMATS: tuple[Format, ...] = ("json", "yaml", "toml")
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


def faults_of(text: str, format_: Format) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_document(text, format_=format_, source="job")
    assert caught.value.source == "job"
    return caught.value.faults


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


class TestSyntax:
    def test_a_json_fault_has_line_column_and_what_was_found(self) -> None:
        assert faults_of('{"a": 1,\n "b" 2}', "json") == [
            "line 2, column 6: found \"2\": expecting ':' delimiter (JSON)"
        ]

    def test_json_that_ends_early_says_so(self) -> None:
        assert "found the end of the document" in faults_of('{"a": ', "json")[0]

    def test_a_yaml_fault_has_line_column_and_what_was_found(self) -> None:
        (fault,) = faults_of("a: 1\n  b: 2\n", "yaml")
        assert fault.startswith("line 2, column 4: found ': 2'")

    def test_a_toml_fault_has_line_column_and_what_was_found(self) -> None:
        (fault,) = faults_of('a = 1\nb = "x" y\n', "toml")
        assert fault.startswith('line 2, column 9: found "y"')

    @pytest.mark.parametrize("format_", FORMATS)
    @pytest.mark.parametrize("text", ["", "  \n\t\n"])
    def test_an_empty_document_is_refused(self, text: str, format_: Format) -> None:
        assert "empty" in faults_of(text, format_)[0]

    @pytest.mark.parametrize("format_", FORMATS)
    def test_a_nul_byte_is_refused_with_its_place(self, format_: Format) -> None:
        assert faults_of("ab\nc\x00", format_) == [
            "line 2, column 2: found a NUL byte, which no document may hold"
        ]

    @pytest.mark.parametrize("format_", FORMATS)
    def test_an_enormous_document_is_refused_before_it_is_parsed(self, format_: Format) -> None:
        assert "at most" in faults_of("#" * (MAX_CHARS[format_] + 1), format_)[0]

    @pytest.mark.parametrize(
        ("text", "format_"),
        [
            ("[" * 100_000, "json"),
            ('{"a":' * 200 + "1" + "}" * 200, "json"),
            ("[" * 100_000, "yaml"),
            ("- " * 100_000, "yaml"),
            ("a = " + "[" * 5_000, "toml"),
            (".".join("a" * 3_000) + " = 1", "toml"),
        ],
    )
    def test_deep_nesting_is_refused(self, text: str, format_: Format) -> None:
        assert f"nested deeper than {MAX_DEPTH} levels" in faults_of(text, format_)[0]

    def test_repeated_json_keys_are_all_named_with_their_path(self) -> None:
        assert faults_of('{"a": 1, "a": 2, "d": [{"x": 1, "x": 1, "x": 1}]}', "json") == [
            'a: the key "a" is given more than once',
            'd[0].x: the key "x" is given more than once',
        ]

    def test_a_repeated_yaml_key_is_named_with_its_line(self) -> None:
        assert faults_of("a: 1\nb: 2\na: 3\n", "yaml") == [
            'line 3, column 1: the key "a" is given more than once (YAML)'
        ]

    @pytest.mark.parametrize(
        ("text", "format_"),
        [
            ('{"x": NaN}', "json"),
            ('{"x": -Infinity}', "json"),
            ('{"x": 1e999}', "json"),
            ("x: .nan", "yaml"),
            ("x: -.inf", "yaml"),
            ("x: -.INF", "yaml"),
            ("x: .NaN", "yaml"),
            ("x = inf", "toml"),
        ],
    )
    def test_numbers_that_are_not_finite_are_refused(self, text: str, format_: Format) -> None:
        (fault,) = faults_of(text, format_)
        assert fault.startswith("x: found ")
        assert fault.endswith("expected a finite number")

    @pytest.mark.parametrize("digits", ["9" * 25, "9" * 5000])
    @pytest.mark.parametrize(
        ("format_", "text"), [("json", '{"x": %s}'), ("yaml", "x: %s"), ("toml", "x = %s")]
    )
    def test_numbers_above_64_bits_are_refused(self, digits: str, format_: Format, text: str) -> None:
        assert faults_of(text % digits, format_)

    def test_dates_are_refused_with_what_to_do(self) -> None:
        assert faults_of("x = 2020-01-01", "toml") == [
            "x: found a date, expected a value that JSON can hold: put it in quotes"
        ]

    def test_a_lone_surrogate_is_refused(self) -> None:
        assert faults_of('{"x": "\\ud800"}', "json") == [
            "x: found text with half a character (a lone surrogate), which no field may hold"
        ]


class TestYaml:
    def test_scalars_follow_the_core_schema(self) -> None:
        text = "[1e-4, -0x1, 0x1F, 0o17, +3, 1., .5, no, on, Yes, True, ~, 12:30, 2020-01-01, '1', !!str 1, 1_000, 010]"
        assert parse_document(text.replace("-0x1, ", ""), format_="yaml", source="") == [
            1e-4, 31, 15, 3, 1.0, 0.5, "no", "on", "Yes", True, None, "12:30", "2020-01-01", "1", "1", "1_000", 10,
        ]  # fmt: skip

    def test_merge_keys_yield_to_the_keys_beside_them(self) -> None:
        text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {z: 3, <<: [*a, *b]}\nd: {<<: *a}\n"
        data: Any = parse_document(text, format_="yaml", source="")
        assert data["c"] == {"x": 1, "y": 1, "z": 3}
        assert data["d"] == {"x": 1, "y": 1}

    def test_a_quoted_merge_sign_is_a_key(self) -> None:
        assert parse_document("{'<<': 1}", format_="yaml", source="") == {"<<": 1}

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("a: !!python/object:os.system x", "tags are not supported"),
            ("a: !!python/tuple [1]", "tags are not supported"),
            ("a: !!binary aGk=", "tags are not supported"),
            ("a: &x [*x]", "inside its own value"),
            ("a: *x", "no &x before it"),
            ("a: {<<: 3}", "after `<<:`"),
            ("--- 1\n--- 2\n", "second document"),
            ("1: a", "put it in quotes"),
            ("[a]: b", "as a key"),
            ("a: \x07", "control characters"),
            ("\t- a", "cannot start any token"),
        ],
    )
    def test_what_cannot_be_said_in_json_is_refused_with_its_place(self, text: str, says: str) -> None:
        (fault,) = faults_of(text, "yaml")
        assert says in fault
        assert fault.startswith(("line ", "at offset "))

    def test_an_alias_bomb_is_refused(self) -> None:
        assert "aliases expanded" in faults_of(BOMB, "yaml")[0]

    def test_a_bomb_of_merge_keys_is_refused(self) -> None:
        keys = ",".join(f"k{i}: 1" for i in range(5_000))
        text = f"a: &a {{{keys}}}\nb: {{<<: [{','.join(['*a'] * 5_000)}]}}"
        assert "merge keys expand" in faults_of(text, "yaml")[0]


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("j.json", '{"a": [1]}'),
            ("j.YAML", "a: [1]"),
            ("j.yml", "a:\n- 1"),
            ("j.toml", "a = [1]"),
            ("job", '{"a": [1]}'),
        ],
    )
    def test_the_suffix_names_the_format(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        assert read_document(tmp_path / name) == {"a": [1]}

    def test_a_byte_order_mark_is_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "j.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
        assert read_document(tmp_path / "j.json") == {"a": 1}

    def test_bytes_that_are_not_utf8_are_refused_with_their_place(self, tmp_path: Path) -> None:
        (tmp_path / "j.json").write_bytes(b'{"a":\n "\xff"}')
        with pytest.raises(SpecError, match="line 2, column 3: found byte 0xff, expected UTF-8"):
            read_document(tmp_path / "j.json")

    def test_a_missing_file_and_a_folder_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="No such file"):
            read_document(tmp_path / "none.json")
        with pytest.raises(SpecError, match="directory"):
            read_document(tmp_path)
        with pytest.raises(SpecError, match="cannot be read"):
            read_document("a\x00b.json")


class TestFuzz:
    @settings(max_examples=150, deadline=None)
    @given(
        text=st.text() | st.text("{}[]:,\"'-&*!<>|%@#= \n\t0123456789.abcnul\\", max_size=60),
        format_=st.sampled_from(FORMATS),
    )
    @example(text="a: |\n \x85", format_="yaml")
    @example(text="%YAML 9.9\n--- a", format_="yaml")
    @example(text="%TAG ! x\n--- !a b", format_="yaml")
    @example(text="? a", format_="yaml")
    @example(text="\ufeff", format_="yaml")
    @example(text="0001-99-99", format_="toml")
    @example(text="a = 9999-99-99", format_="toml")
    @example(text="\ud800", format_="json")
    def test_any_text_gives_plain_data_or_a_spec_error(self, text: str, format_: Format) -> None:
        try:
            data = parse_document(text, format_=format_, source="job")
        except SpecError:
            return
        json.dumps(data, allow_nan=False).encode()

    @settings(max_examples=80, deadline=None)
    @given(data=plain)
    def test_plain_data_survives_json(self, data: object) -> None:
        assert parse_document(json.dumps(data), format_="json", source="") == data

    @settings(max_examples=80, deadline=None)
    @given(data=plain)
    def test_json_means_the_same_in_yaml(self, data: object) -> None:
        # JSON writes characters above U+FFFF as two escapes, which the YAML parser does not join.
        text = json.dumps(data)
        if "\\ud8" not in text and "\\ud9" not in text and "\\uda" not in text and "\\udb" not in text:
            assert parse_document(text, format_="yaml", source="") == data


class TestPlainness:
    def test_every_value_that_is_not_plain_is_named(self) -> None:
        with pytest.raises(SpecError) as caught:
            require_plain({"a": {1, 2}, "b": [b"x", object()], 3: {"c": float("nan")}}, source="s")
        assert [fault.partition(":")[0] for fault in caught.value.faults] == [
            "(document)",
            "a",
            "b[0]",
            "b[1]",
            "[3].c",
        ]

    def test_a_cycle_is_refused(self) -> None:
        loop: list[Any] = []
        loop += [loop, loop, loop]
        with pytest.raises(SpecError, match=r"nested deeper|holds more"):
            require_plain(loop, source="s")

    def test_thousands_of_faults_are_counted_not_shown(self) -> None:
        with pytest.raises(SpecError) as caught:
            require_plain([None, *[float("nan")] * 1000], source="s")
        assert len(caught.value.faults) == MAX_FAULTS_SHOWN + 1
        assert caught.value.faults[-1] == "and 950 more"

    def test_paths_and_values_are_shown_as_people_write_them(self) -> None:
        assert render_path(("a", "b", 0, "c d")) == 'a.b[0]["c d"]'
        assert render_value("x" * 100) == '"' + "x" * 59 + '…"'
        assert render_value("a\nb") == '"a\\nb"'
        assert [render_value(value) for value in (None, True, 1.5, [], {"a": 1})] == [
            "null",
            "true",
            "1.5",
            "an empty list",
            "an object with a",
        ]


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: Annotated[int, msgspec.Meta(ge=1)] = 1
    rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: Annotated[str, msgspec.Meta(min_length=1)]
    mode: Literal["min", "max"] = "min"
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: list[Inner] = []
    every: int | Literal["epoch"] | None = None
    code: Annotated[str, msgspec.Meta(pattern="^[a-z]+$", description="lower-case letters")] = "a"
    flags: dict[str, bool] = {}
    free: Any = None


def record_faults(data: object) -> list[str]:
    with pytest.raises(SpecError) as caught:
        convert_document(data, Outer, source="o")
    return caught.value.faults


class TestRecords:
    def test_a_sound_document_becomes_the_record(self) -> None:
        data = {
            "title": "t",
            "maybe": {"rate": 1},
            "many": [{"size": 2}],
            "every": "epoch",
            "flags": {"a": True},
            "free": [1],
        }
        record = convert_document(data, Outer, source="o")
        assert record == Outer(
            title="t", maybe=Inner(rate=1.0), many=[Inner(size=2)], every="epoch", flags={"a": True}, free=[1]
        )
        assert record.maybe is not None
        assert type(record.maybe.rate) is float

    def test_every_fault_is_reported_at_once(self) -> None:
        data = {
            "mode": "maxx", "inner": {"size": 0, "rate": 2}, "maybe": {"sise": 1}, "many": [{}, {"size": "3"}, 7],
            "every": "epohc", "code": "A", "flags": {"a": 1}, "colour": "red",
        }  # fmt: skip
        assert record_faults(data) == [
            "unknown field `colour`: expected one of title, mode, inner, maybe, many, every, code, flags, free",
            "title: missing, expected text that is not empty",
            'mode: found "maxx", expected "min" or "max": did you mean "max"?',
            "inner.size: found 0, expected a whole number of at least 1",
            "inner.rate: found 2, expected a number above 0 and of at most 1",
            "maybe: unknown field `sise`: did you mean `size`?",
            'many[1].size: found "3", expected a whole number of at least 1 (without quotes)',
            "many[2]: found 7, expected an object with size, rate",
            'every: found "epohc", expected a whole number or "epoch" or null: did you mean "epoch"?',
            'code: found "A", expected lower-case letters',
            "flags.a: found 1, expected true or false",
        ]

    @pytest.mark.parametrize("value", ["32", True, 3.0, None, [1], {}])
    def test_nothing_is_coerced_to_a_whole_number(self, value: object) -> None:
        assert record_faults({"title": "t", "inner": {"size": value}})[0].startswith("inner.size: found ")

    @pytest.mark.parametrize("value", ["0.5", True, None])
    def test_nothing_is_coerced_to_a_number(self, value: object) -> None:
        assert record_faults({"title": "t", "inner": {"rate": value}})[0].startswith("inner.rate: found ")

    @pytest.mark.parametrize("value", [0, 1, "true", None])
    def test_nothing_is_coerced_to_a_flag(self, value: object) -> None:
        assert record_faults({"title": "t", "flags": {"a": value}})[0].startswith("flags.a: found ")

    def test_text_where_a_list_is_meant_is_refused_with_what_to_do(self) -> None:
        assert '(a list of one is ["x"])' in record_faults({"title": "t", "many": "x"})[0]

    def test_a_field_of_another_part_is_pointed_to(self) -> None:
        class Root(msgspec.Struct, forbid_unknown_fields=True):
            section: Inner = Inner()

        with pytest.raises(SpecError, match=r"unknown field `rate`: did you mean `section.rate`\?"):
            convert_document({"rate": 1}, Root, source="o")

    def test_thousands_of_unknown_fields_are_refused_without_a_guess_for_each(self) -> None:
        found = record_faults({"title": "t"} | {f"titl{number}": 1 for number in range(100_000)})
        assert found[0] == "unknown field `titl0`: did you mean `title`?"
        assert found[-1] == f"and {100_000 - MAX_FAULTS_SHOWN} more"

    def test_names_are_near_whatever_their_case_and_hyphens(self) -> None:
        assert nearest_name("Batch-Size", ["batch_size", "readahead"]) == "batch_size"
        assert nearest_name("zzz", ["batch_size"]) is None
