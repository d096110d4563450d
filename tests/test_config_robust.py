"""Whatever a run file holds, it ends in a Run or in a ConfigError: never in a traceback."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podtune.config.errors import ConfigError
from podtune.config.loading import load_run
from podtune.config.overrides import subject_in
from podtune.config.schema import Run, Subject

quietly = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def keys_of(block: type[Subject], above: str = "") -> list[str]:
    """The path of every key."""
    found = []
    for name, field in block.model_fields.items():
        found.append(above + name)
        inner = subject_in(field.annotation)
        if inner is not None:
            found += keys_of(inner, f"{above}{name}.")
    return found


KEYS = keys_of(Run)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["auto", "none", "lora", "full", "qlora", "adamw", "1e-4", "10m", "$HOME", "$", "~", "~nobody/x", "hub://"]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from([key.split(".")[-1] for key in KEYS]), st.text(max_size=4)), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
FOUR = {"model": "m", "data": "d", "method": "lora", "output": "o"}


def load(folder, text: str | bytes, *overrides: str) -> None:
    """Loads it; passes when that is refused in the proper way."""
    file = folder / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    faults: tuple[str, ...] = ("none",)
    try:
        load_run(file, overrides)
    except ConfigError as error:
        faults = error.faults
    assert faults
    for fault in faults:
        assert not any(noise in fault for noise in ("pydantic", "stand-in", "function-"))


@quietly
@given(
    raw=st.one_of(
        st.binary(max_size=60), st.text(max_size=60), st.text(alphabet="ab:-[]{}&*!|>'\"%@# \n\t,?<", max_size=40)
    )
)
def test_any_text_ends_in_a_run_or_in_faults(tmp_path, raw):
    load(tmp_path, raw)


@quietly
@given(changes=st.lists(st.tuples(st.sampled_from(KEYS), values), min_size=1, max_size=3))
def test_any_value_at_any_key_ends_in_a_run_or_in_faults(tmp_path, changes):
    run = dict(FOUR)
    for key, value in changes:
        holder = run
        *above, last = key.split(".")
        for part in above:
            if not isinstance(holder.get(part), dict):
                holder[part] = {}
            holder = holder[part]
        holder[last] = value
    load(tmp_path, json.dumps(run))


@quietly
@given(
    key=st.one_of(st.sampled_from(KEYS), st.text(max_size=8), st.from_regex(r"data\.(train|validation)\.[0-9]\.\w+")),
    value=values,
)
def test_any_override_ends_in_a_run_or_in_faults(tmp_path, key, value):
    load(tmp_path, json.dumps(FOUR), f"{key}={json.dumps(value)}")


@pytest.mark.parametrize(
    "text", ["''0", '"\\ud800": 1', 'model: "\\ud800"', "<: 1", "<list>: {<scalar>: 1}", "{<<: 1}"]
)
def test_texts_that_once_ended_in_a_traceback_are_faults(tmp_path, text):
    load(tmp_path, text)


def test_a_character_in_two_halves_as_json_writes_it_is_one(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(FOUR | {"eval": {"prompts": ["\U0001f600"]}}))
    assert "\\ud83d" in file.read_text()
    assert load_run(file).eval.prompts == ("\U0001f600",)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_refuses_what_it_cannot_mean_at_its_own_place(tmp_path, key):
    """A mapping with an unknown key is right nowhere, and the fault names the line."""
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(FOUR))
    with pytest.raises(ConfigError) as caught:
        load_run(file, [f"{key}={{no_such_key: 1}}"])
    assert any(fault.startswith(f"command line: {key}=") for fault in caught.value.faults) or "method." in key
