"""Settings from the command line are laid over the file and checked like it."""

import pytest
from test_config import FOUR_LINES, faults_of, read


def test_an_override_replaces_the_files_value(tmp_path):
    run = read(
        tmp_path,
        f"{FOUR_LINES}train: {{learning_rate: 1e-3, steps: 5}}\n",
        "train.learning_rate=1e-4",
        "eval.prompts=[one, two]",
        "train.steps=7",
        "output=./elsewhere",
        "export.dtype=bfloat16",
    )
    assert (run.train.learning_rate, run.train.steps, run.output.path) == (1e-4, 7, "./elsewhere")
    assert run.eval.prompts == ("one", "two")
    assert run.export.dtype == "bfloat16"


def test_a_scalar_form_on_the_way_becomes_its_mapping(tmp_path):
    run = read(
        tmp_path,
        FOUR_LINES,
        "method.lora.rank=8",
        "data.train.0.weight=2",
        "data.max_length=64",
        "data.train.1=more.jsonl",
        "model.cache=/tmp/models",
        "train.optimizer.beta2=0.95",
    )
    assert run.method.lora is not None
    assert run.method.lora.rank == 8
    assert [(source.path, source.weight) for source in run.data.train] == [("./train.jsonl", 2.0), ("more.jsonl", 1.0)]
    assert (run.model.source, run.model.cache, run.data.max_length) == ("some/model", "/tmp/models", 64)
    assert run.train.optimizer.beta2 == 0.95


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.learning_rte=1e-4", 'unknown key "learning_rte", did you mean "learning_rate"?'),
        ("train.learning_rate=fast", 'train.learning_rate: wanted a number above 0 or auto, read the text "fast"'),
        ("train.learning_rate=", "nothing stands behind train.learning_rate=; write none for no value"),
        ("train.steps= ", "nothing stands behind train.steps=; write none for no value"),
        ("trian.steps=3", 'unknown key "trian", did you mean "train"?'),
        ("train.steps.more=3", "train.steps: wanted a whole number"),
        ("data.train.0.weight=1e300", "data.train.0.weight: wanted a number above 0 and at most 1000, read"),
        ("data.train.0.weight=1001", "wanted a number above 0 and at most 1000"),
        ("data.train.5.weight=2", "there is no item 5: the list has 1"),
        ("eval.prompts=[a,b", "not YAML"),
        ("verbose", "wanted key=value"),
        ("=3", "wanted key=value"),
        ("train..steps=3", "wanted key=value"),
        ("method.full={}", "wanted exactly one of full and lora, read both"),
    ],
)
def test_an_override_is_checked_like_the_file_and_named_as_it_was_written(tmp_path, override, said):
    (fault,) = faults_of(tmp_path, FOUR_LINES, override)
    assert said in fault
    assert fault.startswith((f"command line: {override}: ", "run.yaml:3: method"))


def test_faults_of_file_and_command_line_come_together(tmp_path):
    told = faults_of(tmp_path, f"{FOUR_LINES}seed: x\n", "train.steps=0", "eval.samples=-1")
    assert [fault.split(": ")[0] for fault in told] == ["run.yaml:5", "command line", "command line"]


def test_a_key_given_twice_on_the_command_line_is_a_fault_as_in_the_file(tmp_path):
    (fault,) = faults_of(tmp_path, FOUR_LINES, "train.steps=1", "train.seed_all=0", "train.steps=3")[1:]
    said = 'the key "train.steps" is given twice (also as train.steps=1); keep one'
    assert fault == f"command line: train.steps=3: {said}"


@pytest.mark.parametrize(
    "given", [("output=a", "output.path=b"), ("data.train=a", "data=b"), ("model.source=a/b", "model=c/d")]
)
def test_a_key_and_the_scalar_form_that_stands_for_it_are_one_key(tmp_path, given):
    (fault,) = faults_of(tmp_path, FOUR_LINES, *given)
    assert fault.startswith(f"command line: {given[1]}: ")
    assert f"is given twice (also as {given[0]})" in fault


def test_an_override_of_an_aliased_block_changes_that_block_alone(tmp_path):
    text = FOUR_LINES.replace("data: ./train.jsonl", "data: {train: [&one {path: a}, *one]}")
    run = read(tmp_path, text, "data.train.1.weight=3")
    assert [source.weight for source in run.data.train] == [1.0, 3.0]


def test_an_override_can_mend_a_fault_of_the_file(tmp_path):
    assert read(tmp_path, f"{FOUR_LINES}seed: x\n", "seed=4").seed == 4
