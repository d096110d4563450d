"""The resolved file loads to an equal run, and the published JSON Schema agrees with what loading accepts."""

from pathlib import Path
from typing import Any, get_args, get_origin

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ruamel.yaml import YAML

from podtune.config.documentation import document_reference, document_schema
from podtune.config.loading import dump_run, load_run
from podtune.config.overrides import subject_in
from podtune.config.schema import Run, Subject

ROOT = Path(__file__).resolve().parent.parent
text = st.text(min_size=1, max_size=12).filter(lambda value: value.strip() and "\x00" not in value)
path = text.filter(lambda value: "~" not in value and "$" not in value and value.strip() not in ("none", "auto"))
fraction = st.floats(1e-9, 0.49)
sources = st.lists(
    st.one_of(path, st.fixed_dictionaries({"path": path, "weight": st.floats(0.001, 1e3)})), min_size=1, max_size=3
)
optional: dict[str, Any] = {
    "train": st.fixed_dictionaries(
        {},
        optional={
            "steps": st.integers(1000, 2**40),
            "learning_rate": st.one_of(st.just("auto"), st.floats(1e-12, 1e3)),
            "schedule": st.one_of(
                st.sampled_from(["cosine", "linear", "constant", "wsd"]),
                st.fixed_dictionaries({"name": st.just("wsd"), "warmup": fraction, "decay_fraction": fraction}),
            ),
            "clip_norm": st.one_of(st.none(), st.just("none"), st.floats(1e-3, 1e3)),
            "checkpoint_every": st.from_regex(r"[1-9][0-9]{0,3}(\.[0-9]{1,2})?[smh]", fullmatch=True),
            "spike_guard": st.one_of(st.none(), st.sampled_from(["none", "skip", "stop"])),
        },
    ),
    "eval": st.fixed_dictionaries(
        {}, optional={"every": st.one_of(st.integers(1, 1000), fraction), "prompts": st.lists(text)}
    ),
    "export": st.fixed_dictionaries(
        {}, optional={"dtype": st.sampled_from(["auto", "float16"]), "merged": st.just(True)}
    ),
    "seed": st.integers(0, 2**32 - 1),
}
runs = st.fixed_dictionaries(
    {
        "model": path.map(lambda value: "m/" + value),
        "data": st.one_of(
            path.map(lambda value: "d/" + value),
            st.fixed_dictionaries(
                {"train": sources},
                optional={
                    "validation": st.one_of(st.sampled_from(["auto", "none"]), st.integers(1, 10**6), fraction),
                    "columns": st.dictionaries(st.sampled_from(["prompt", "completion", "text"]), text),
                    "shape": st.sampled_from(["auto", "text", "messages"]),
                },
            ),
        ),
        "method": st.sampled_from(["lora", "full", {"lora": {"rank": 4, "targets": ["*.q", "o"]}}]),
        "output": path.map(lambda value: "o/" + value),
    },
    optional=optional,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_run=runs)
def test_a_dumped_run_loads_to_an_equal_run(tmp_path, given_run):
    run = Run.model_validate(given_run)
    dumped = dump_run(run)
    file = tmp_path / "run.yaml"
    file.write_text(dumped, encoding="utf-8")
    loaded = load_run(file)
    assert loaded == run
    assert dump_run(loaded) == dumped


def test_a_dumped_run_reads_the_same_in_another_yaml_reader(tmp_path):
    run = Run.model_validate(
        {
            "model": "a: b # c",
            "data": ["no", "1e-4", "#x", "ü"],
            "method": "lora",
            "output": "true",
            "eval": {"prompts": ["one\ntwo"]},
        }
    )
    assert YAML(typ="safe", pure=True).load(dump_run(run))["eval"]["prompts"] == ["one\ntwo"]
    assert [source["path"] for source in YAML(typ="safe", pure=True).load(dump_run(run))["data"]["train"]] == [
        "no",
        "1e-4",
        "#x",
        "ü",
    ]


VALID: list[dict[str, Any]] = [
    {"model": "m", "data": "d", "method": "lora", "output": "o"},
    {"model": {"source": "m"}, "data": ["a", {"path": "b", "weight": 2}], "method": "full", "output": {"path": "o"}},
    {"model": "m", "data": {"train": "a", "validation": "none"}, "method": {"lora": {"rank": 4}}, "output": "o"},
    {"model": "m", "data": {"train": ["a"], "validation": 0.1}, "method": {"lora": None}, "output": "o"},
    {
        "model": "m",
        "data": {"train": ["a"], "validation": ["v"]},
        "method": {"lora": {"targets": "*.q"}},
        "output": "o",
    },
    {
        "model": "m",
        "data": "d",
        "method": "lora",
        "output": "o",
        "train": {
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "schedule": {"name": "wsd", "warmup": 10},
            "early_stopping": 2,
            "clip_norm": "none",
        },
        "eval": {"every": 5, "prompts": "one"},
        "mesh": {"data": "auto", "fsdp": 2},
    },
]
INVALID: list[dict[str, Any]] = [
    {"model": "m", "data": "d", "method": "lora"},
    {**VALID[0], "learning_rte": 1},
    {**VALID[0], "method": "qlora"},
    {**VALID[0], "method": {"lora": {"rank": 0}}},
    {**VALID[0], "train": {"learning_rate": "fast"}},
    {**VALID[0], "data": {"train": [{"path": "a", "weight": -1}]}},
    {**VALID[0], "data": {"train": "a", "validation": 0}},
    {**VALID[0], "train": {"checkpoint_every": 600}},
]


@pytest.mark.parametrize("example", VALID)
def test_the_json_schema_takes_what_loading_takes(example):
    Run.model_validate(example)
    jsonschema.Draft202012Validator(document_schema()).validate(example)


@pytest.mark.parametrize("example", INVALID)
def test_the_json_schema_refuses_what_loading_refuses(example):
    with pytest.raises(ValidationError):
        Run.model_validate(example)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(document_schema()).validate(example)


def test_the_json_schema_is_a_schema_and_takes_every_recipe_and_every_resolved_run():
    jsonschema.Draft202012Validator.check_schema(document_schema())
    validator = jsonschema.Draft202012Validator(document_schema())
    recipes = sorted((ROOT / "recipes").glob("*.yaml"))
    for recipe in recipes:
        validator.validate(YAML(typ="safe", pure=True).load(recipe))
    for example in VALID:
        validator.validate(YAML(typ="safe", pure=True).load(dump_run(Run.model_validate(example))))


def test_every_key_is_described_and_frozen():
    def walk(block: type[Subject]) -> None:
        for name, field in block.model_fields.items():
            assert field.description, f"{block.__name__}.{name}"
            inner = subject_in(field.annotation)
            if inner is not None:
                walk(inner)

    walk(Run)
    run = Run.model_validate(VALID[0])
    with pytest.raises(ValidationError):
        run.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_no_list_of_a_run_can_be_changed():
    def lists(annotation: Any) -> bool:
        return get_origin(annotation) is list or any(lists(part) for part in get_args(annotation))

    def walk(block: type[Subject]) -> None:
        for name, field in block.model_fields.items():
            assert not lists(field.annotation), f"{block.__name__}.{name}"
            inner = subject_in(field.annotation)
            if inner is not None:
                walk(inner)

    walk(Run)


def test_the_page_of_every_key_is_up_to_date():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == document_reference(), "run: podtune schema --markdown > docs/configuration.md"
    for name in ("rank", "learning_rate", "too_long", "checkpoint_every"):
        assert f"| `{name}` |" in page
