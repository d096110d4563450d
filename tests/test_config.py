"""A run file: what it may say, and what is said of one that is wrong."""

import re
from pathlib import Path

import pytest

from podtune.config.documentation import document_reference
from podtune.config.errors import ConfigError, UserError
from podtune.config.loading import _homes, load_run  # pyright: ignore[reportPrivateUsage]
from podtune.config.other_names import OTHER_NAMES
from podtune.config.schema import Run
from podtune.config.training import LEARNING_RATE_FACTORS, OPTIMIZER_SETTINGS

FOUR_LINES = "model: some/model\ndata: ./train.jsonl\nmethod: lora\noutput: ./runs/one\n"


def read(folder: Path, text: str | bytes, *overrides: str):
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_run(path, overrides)


def faults_of(folder: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The faults, the folder's name left out."""
    with pytest.raises(ConfigError) as caught:
        read(folder, text, *overrides)
    assert caught.value.exit_status == 2
    return [fault.replace(f"{folder}/", "") for fault in caught.value.faults]


def test_four_keys_are_a_whole_run_with_the_defaults_of_the_design(tmp_path):
    run = read(tmp_path, FOUR_LINES)
    assert run.model.source == "some/model"
    assert run.data.train[0].path == "./train.jsonl"
    assert run.method.lora is not None
    assert (run.method.name, run.method.lora.rank, run.method.lora.alpha) == ("lora", 16, 32.0)
    assert run.data.packing
    assert run.train.schedule.name == "cosine"
    assert run.train.schedule.warmup == 0.03
    assert run.train.clip_norm == 1.0
    assert run.learning_rate == 2e-4
    assert read(tmp_path, FOUR_LINES, "method=full").learning_rate == 2e-5
    assert run.exports_adapter
    assert not read(tmp_path, FOUR_LINES, "method=full").exports_adapter


_OPTIONAL = ("train.spike_guard.", "train.early_stopping.")


def keys_with_defaults() -> list[tuple[str, str]]:
    """Every key that the reference gives a default for, and that default, as a user reads them there."""
    keys, block = [], ""
    for line in document_reference().splitlines():
        if line.startswith("## "):
            block = line.removeprefix("## ").strip("`").replace("Top level", "")
        if (row := re.match(r"\| `(\w+)` \| `(.+?)` \|", line)) is not None:
            keys.append((f"{block}.{row[1]}".lstrip("."), row[2]))
    # Blocks that are not there until they are named have keys with defaults, too.
    return [(key, default) for key, default in keys if not key.startswith(("method.", *_OPTIONAL))]


@pytest.mark.parametrize(("key", "default"), keys_with_defaults())
def test_a_key_that_says_its_documented_default_is_as_if_unset(tmp_path, key, default):
    text = FOUR_LINES.replace("data: ./train.jsonl", "data: {train: {path: ./train.jsonl}}")
    key = key.replace("data.train.", "data.train.0.") if key.startswith("data.train.") else key
    assert read(tmp_path, text, f"{key}={default}") == read(tmp_path, text)


def test_none_as_steps_leaves_the_epochs_as_they_are(tmp_path):
    for none in ("none", "null"):
        assert read(tmp_path, FOUR_LINES + f"train: {{steps: {none}}}\n") == read(tmp_path, FOUR_LINES)
    assert read(tmp_path, FOUR_LINES + "train: {steps: 4}\n", "train.steps=none").train.epochs == 3
    assert read(tmp_path, FOUR_LINES.replace("lora", "{lora: {rank: 4}, full: none}")).method.name == "lora"


@pytest.mark.parametrize(("name", "tenths"), [("adamw", 10), ("adafactor", 10), ("muon", 10), ("lion", 1)])
def test_the_usual_learning_rate_is_that_of_the_optimizer(tmp_path, name, tenths):
    assert read(tmp_path, FOUR_LINES, f"train.optimizer={name}").learning_rate == pytest.approx(2e-5 * tenths)
    given = read(tmp_path, FOUR_LINES, f"train.optimizer={name}", "train.learning_rate=3e-4")
    assert given.learning_rate == 3e-4


def test_an_optimizer_without_a_usual_learning_rate_wants_one(tmp_path):
    (fault,) = faults_of(tmp_path, FOUR_LINES, "train.optimizer=sgd")
    assert "train.learning_rate: sgd has no usual rate" in fault
    assert "try 0.1" in fault
    assert read(tmp_path, FOUR_LINES, "train.optimizer=sgd", "train.learning_rate=0.1").learning_rate == 0.1
    assert {name for name, factor in LEARNING_RATE_FACTORS.items() if factor is None} == {"sgd"}
    assert LEARNING_RATE_FACTORS.keys() == OPTIMIZER_SETTINGS.keys()


def test_names_of_other_tools_are_told_by_podtunes_own(tmp_path):
    known = {".".join(home) for home in _homes(Run, ())}
    assert set(OTHER_NAMES.values()) <= known, "each is a key there is"
    assert not [name for name in OTHER_NAMES if name in known], "none is a key itself"
    assert faults_of(tmp_path, FOUR_LINES, "train.lr=1e-4", "method.lora.r=8", "train.batch_size=4") == [
        'command line: train.lr=1e-4: unknown key "lr"; here it is called train.learning_rate',
        'command line: method.lora.r=8: unknown key "r"; here it is called method.lora.rank',
        'command line: train.batch_size=4: unknown key "batch_size"; here it is called train.batch_tokens (in tokens, '
        "not rows)",
    ]


def test_every_scalar_key_also_takes_a_mapping(tmp_path):
    long = """
model: {source: some/model}
data: {train: [{path: ./train.jsonl}]}
method: {lora: {}}
output: {path: ./runs/one}
train: {optimizer: {name: adamw}, schedule: {name: cosine}}
"""
    assert read(tmp_path, long) == read(tmp_path, FOUR_LINES)
    assert read(tmp_path, FOUR_LINES.replace("lora", "{lora: }")) == read(tmp_path, FOUR_LINES)
    short = FOUR_LINES + "train: {early_stopping: 2, spike_guard: rollback, optimizer: lion}\n"
    run = read(tmp_path, short)
    assert run.train.early_stopping is not None
    assert run.train.early_stopping.patience == 2
    assert run.train.spike_guard is not None
    assert run.train.spike_guard.action == "rollback"
    assert run.train.optimizer.name == "lion"


@pytest.mark.parametrize("written", ["1e-4", "1e-4 ", "0.0001", '"1e-4"', "1E-4", "1.0e-04", "+1e-4", "  .1e-3"])
def test_a_learning_rate_is_one_number_however_it_is_written(tmp_path, written):
    assert read(tmp_path, f"{FOUR_LINES}train:\n  learning_rate: {written}\n").train.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("12:30:00", "12:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0b101", "0b101"),
        ("'true'", "true"),
        ("1e", "1e"),
    ],
)
def test_text_that_older_yaml_would_change_stays_text(tmp_path, written, read_as):
    assert read(tmp_path, f"{FOUR_LINES}eval: {{prompts: [{written}]}}\n").eval.prompts == (read_as,)


@pytest.mark.parametrize(("written", "read_as"), [("012", 12), ("0o17", 15), ("0x1F", 31), ("+7", 7), ('"8"', 8)])
def test_whole_numbers_follow_yaml_1_2(tmp_path, written, read_as):
    assert read(tmp_path, f"{FOUR_LINES}seed: {written}\n").seed == read_as


def test_true_and_false_are_the_only_truth_values(tmp_path):
    assert read(tmp_path, f"{FOUR_LINES}export: {{merged: True}}\n").export.merged is True
    (fault,) = faults_of(tmp_path, f"{FOUR_LINES}data: x\n".replace("data: x", "export: {merged: yes}"))
    assert fault.startswith('run.yaml:5: export.merged: wanted true or false, read the text "yes"')


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(tmp_path):
    assert faults_of(tmp_path, f"{FOUR_LINES}train:\n  learning_rte: 1e-4\n") == [
        'run.yaml:6: unknown key "learning_rte", did you mean "learning_rate"?'
    ]
    assert faults_of(tmp_path, f"{FOUR_LINES}learning_rate: 1e-4\n") == [
        'run.yaml:5: unknown key "learning_rate"; it belongs under train'
    ]


def test_duplicate_keys_are_refused_with_both_lines(tmp_path):
    assert faults_of(tmp_path, f"{FOUR_LINES}train:\n  steps: 3\n  steps: 4\nmethod: full\n") == [
        'run.yaml:7: duplicate key "steps", first on line 6',
        'run.yaml:8: duplicate key "method", first on line 3',
    ]


def test_every_fault_is_reported_at_once_in_the_order_of_the_file(tmp_path):
    text = """model: some/model
data: {train: [a.jsonl, {pth: b.jsonl}, {path: c.jsonl, weight: -1}], too_long: cut}
method: {lora: {rank: 0}}
train:
  epochs: 2
  epochs: 3
  steps: 100
  learning_rate: fast
  optimizer:
    name: sgd
    beta1: 0.5
tpu: v5e-8
"""
    told = faults_of(tmp_path, text)
    lines = [int(fault.split(":")[1]) for fault in told]
    assert lines == sorted(lines)
    assert len(told) == len(EXPECTED)
    assert [wanted for fault, wanted in zip(told, EXPECTED, strict=True) if wanted not in fault] == []


EXPECTED = (
    'missing key "output"',
    'missing key "path" under data.train.1',
    'unknown key "pth", did you mean "path"?',
    "data.train.2.weight: wanted a number above 0 and at most 1000, read the number -1",
    'data.too_long: wanted one of drop, truncate, refuse, read the text "cut"',
    "method.lora.rank: wanted a whole number at least 1, read the number 0",
    'duplicate key "epochs", first on line 5',
    "steps=100 and epochs=2 both say how long to train",
    'train.learning_rate: wanted a number above 0 or auto, read the text "fast"',
    "sgd has no beta1; it takes momentum, nesterov",
    '"tpu" is not part of this version of podtune',
)


def test_a_fault_in_a_nested_list_names_its_own_line(tmp_path):
    text = """model: some/model
data:
  train:
    - a.jsonl
    - path: b.jsonl
      weight: heavy
  validation:
    - v.jsonl
    - 3
method:
  lora:
    targets:
      - q
      - 5
output: o
"""
    assert faults_of(tmp_path, text) == [
        'run.yaml:6: data.train.1.weight: wanted a number above 0 and at most 1000, read the text "heavy"',
        "run.yaml:9: data.validation.1.path: wanted text, read the number 3; put it in quotes if it is meant as text",
        "run.yaml:14: method.lora.targets.1: wanted text, read the number 5; put it in quotes if it is meant as text",
    ]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("train: {steps: 1.5}", "train.steps: wanted a whole number at least 1 or none, read the number 1.5"),
        ("train: {steps: true}", "train.steps: wanted a whole number at least 1 or none, read true"),
        ("train: {clip_norm: .inf}", "train.clip_norm: wanted a number above 0 or none, read the number inf"),
        ("train: {ema: .nan}", "train.ema: wanted a number above 0 and below 1 or none, read the number nan"),
        ('train: {weight_decay: "nan"}', 'train.weight_decay: wanted a number at least 0, read the text "nan"'),
        ("train: {checkpoint_every: 600}", "such as 10m or 1h30m, read the number 600"),
        ("train: {remat: [dots]}", "train.remat: wanted one of auto, none, dots, full, read a list"),
        ("train:", "train: wanted a value, read nothing; leave the key out to have its default"),
        ("train: 3", "train: wanted a mapping with any of epochs"),
        ("seed: -1", "seed: wanted a whole number at least 0"),
        ("seed: " + "9" * 500, "seed: wanted a whole number at least 0"),
        ("mesh: {data: all}", 'mesh.data: wanted a whole number at least 1 or auto, read the text "all"'),
        ("eval: {every: 1.5}", "eval.every: wanted a whole number of steps (at least 1) or a fraction between 0 and 1"),
        ('eval: {prompts: [""]}', "eval.prompts.0: wanted text, read an empty text"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_read_and_what_was_wanted(tmp_path, block, said):
    (fault,) = faults_of(tmp_path, f"{FOUR_LINES}{block}\n")
    assert fault.startswith("run.yaml:5: ")
    assert said in fault


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("train: {steps: 10, epochs: 2}", "both say how long to train"),
        ("train: {epochs: none}", "nothing says how long to train"),
        ("method: full\nexport: {adapter: true}", "method: full trains no adapter to export"),
        ("export: {merged: false, adapter: false}", "nothing would be exported"),
        ("data: {train: a, validation: none}\ntrain: {early_stopping: 2}", "needs the validation loss"),
        ("data: {train: a, validation: none}\nexport: {checkpoint: best}", "needs the validation loss"),
        ("data: {train: a, validation: none}\noutput: {path: o, keep_best: true}", "needs the validation loss"),
        ("data: ~no-such-user/a.jsonl", "whose home that is is not known"),
        ("eval: {every: none}\ntrain: {early_stopping: 2}", "eval.every is none"),
        ("eval: {every: none}\nexport: {checkpoint: best}", "eval.every is none"),
        ("output: {path: o, keep_best: false}\nexport: {checkpoint: best}", "output.keep_best is false"),
        ("data: {train: a, shape: text, train_on: completion}", "has no turns"),
        ("train: {schedule: {decay_fraction: 0.1}}", "decay_fraction belongs to wsd"),
        ("train: {schedule: {name: constant, final_fraction: 0.1}}", "a constant schedule does not fall"),
        ("train: {schedule: {name: wsd, warmup: 0.5, decay_fraction: 0.6}}", "more than the whole run"),
        ("train: {steps: 10, schedule: {warmup: 10}}", "leaves nothing of train.steps=10"),
        ("train: {optimizer: {name: lion, momentum: 0.5}}", "lion has no momentum; it takes beta1, beta2"),
        ("train: {steps: 10}\neval: {every: 11}", "never comes in train.steps=10"),
        ("data: {train: a.jsonl, validation: a.jsonl}", "is trained on as well"),
        (
            "data: {train: a.jsonl, validation: {path: b.jsonl, weight: 5}}",
            "run.yaml:4: data.validation.0.weight: weight=5 does not apply to held-out rows",
        ),
        ("data: {train: {path: a.jsonl, split: test}}", "a.jsonl has no splits"),
        ("output: some/model", "is where the model is read from"),
        ("method: qlora", "qlora is not part of this version of podtune; use lora"),
        ("method: {qlora: {rank: 4}}", "qlora is not part of this version of podtune; use lora"),
        ("method: {lora: {}, full: {}}", "wanted exactly one of full and lora, read both"),
        ("method: {}", "wanted exactly one of full and lora, read neither"),
        ("method: adapters", "wanted one of full, lora or a mapping"),
        ("launch: gke", '"launch" is not part of this version'),
        ("data: {train: a, columns: {promt: q}}", 'unknown key "promt", did you mean "prompt"?'),
        ("data: {train: a, columns: {prompt: 3}}", "data.columns.prompt: wanted the name of a column"),
        ("data: {train: []}", "data.train: wanted one or a list of them, read an empty list"),
    ],
)
def test_a_rule_that_spans_keys_is_kept(tmp_path, block, said):
    given = {line.split(":")[0] for line in block.splitlines()}
    kept = "".join(f"{line}\n" for line in FOUR_LINES.splitlines() if line.split(":")[0] not in given)
    (fault,) = faults_of(tmp_path, f"{kept}{block}\n")
    assert said in fault


def test_rules_hold_for_runs_made_in_python_too():
    from pydantic import ValidationError

    from podtune.config.schema import Run

    four = {"model": "m", "data": "d", "method": "lora", "output": "o"}
    with pytest.raises(ValidationError, match="both say how long to train"):
        Run.model_validate(four | {"train": {"steps": 1, "epochs": 1}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "run.yaml:1: the file is empty"),
        (b"# only a comment\n\n", "run.yaml:1: the file is empty"),
        (b"- model: x\n", "run.yaml:1: wanted a mapping with model, data, method and output, read a list"),
        (b"just text\n", "read a single value"),
        (b"model: x\ndata: a: b\n", "run.yaml:2: not YAML: mapping values are not allowed here"),
        (b"model: x\ntrain:\n\tsteps: 3\n", "run.yaml:3: a tab cannot indent"),
        (b"model: 'x\ndata: y\n", "that begins on line 1"),
        (b"model: [x\ndata: y\n", "that begins on line 1"),
        (b"model: x\ndata: caf\xe9\n", "run.yaml:2: not UTF-8 (byte 0xe9)"),
        (b"model: x\n\ndata: \x01\n", "run.yaml:3: the character U+0001 is not allowed"),
        (b"\x00\x00\x00", "run.yaml:1: the character U+0000 is not allowed"),
        (b"a: " + b"[" * 3000, "nested deeper than 24 levels"),
        (b"a: " + b"{b: " * 3000, "nested deeper than 24 levels"),
        (b"- " * 3000, "nested deeper than 24 levels"),
        (b"x" * ((1 << 20) + 1), "larger than 1 MiB"),
        (b"%YAML 3.0\n---\nmodel: x\n", "not YAML"),
    ],
)
def test_a_file_that_is_no_run_file_ends_in_one_clear_line(tmp_path, text, said):
    (fault,) = faults_of(tmp_path, text)
    assert said in fault


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{FOUR_LINES}---\nmodel: y\n", "run.yaml:5: a second document begins here"),
        (f"{FOUR_LINES}train: {{<<: {{steps: 3}}}}\n", "run.yaml:5: merge keys (<<) are not part of YAML 1.2"),
        (f"{FOUR_LINES}seed: !!int 3\n", "run.yaml:5: the tag tag:yaml.org,2002:int has no meaning"),
        (f"{FOUR_LINES}seed: *there\n", "run.yaml:5: *there names no anchor"),
        (f"{FOUR_LINES}? [a, b]\n: 3\n", "run.yaml:5: a key must be plain text"),
        (f"{FOUR_LINES}eval: {{prompts: &here [*here]}}\n", "run.yaml:5: *here holds itself"),
    ],
)
def test_what_a_run_file_does_not_use_of_yaml_is_refused(tmp_path, text, said):
    assert said in faults_of(tmp_path, text)[0]


def test_anchors_and_aliases_stand_for_their_values(tmp_path):
    text = f"{FOUR_LINES}train: {{steps: &count 30, log_every: *count}}\n"
    assert read(tmp_path, text).train.log_every == 30


def test_aliases_that_multiply_are_stopped(tmp_path):
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    bomb += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 15))
    (fault,) = faults_of(tmp_path, bomb)
    assert "holds more than 100,000 values" in fault


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_changes_nothing(tmp_path, encoding):
    text = FOUR_LINES.replace("./runs/one", "./runs/één")
    assert read(tmp_path, text.encode(encoding)) == read(tmp_path, text)
    assert read(tmp_path, text.replace("\n", "\r\n")) == read(tmp_path, text)


def test_a_missing_file_and_a_directory_are_told(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        load_run(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="this is a directory"):
        load_run(tmp_path)


def test_home_and_variables_are_expanded_in_paths_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", "/data")
    monkeypatch.setenv("HOME", "/home/someone")
    text = """model: $PLACE/model
data: ["${PLACE}/a.jsonl", ~/b.jsonl, "cost$$5.jsonl"]
method: lora
output: ~/runs
eval: {prompts: ["$PLACE is a name"]}
"""
    run = read(tmp_path, text)
    assert run.model.source == "/data/model"
    assert [source.path for source in run.data.train] == ["/data/a.jsonl", "/home/someone/b.jsonl", "cost$5.jsonl"]
    assert run.output.path == "/home/someone/runs"
    assert run.eval.prompts == ("$PLACE is a name",)
    (fault,) = faults_of(tmp_path, FOUR_LINES.replace("./train.jsonl", "$NOWHERE_SET/a"))
    assert "run.yaml:2: data.train.0.path: the variable $NOWHERE_SET is not set" in fault


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('"out\\0put"', "no path holds a NUL character"),
        ("x" * 300, "a name of more than 255 bytes"),
        ("a/" * 3000, "systems take 4,096 bytes"),
    ],
)
def test_paths_that_no_system_takes_are_refused_at_their_line(tmp_path, written, said):
    (fault,) = faults_of(tmp_path, FOUR_LINES.replace("./runs/one", written))
    assert fault.startswith("run.yaml:4: output")
    assert said in fault


def test_a_source_without_a_path_is_told_once_and_not_for_its_split_too(tmp_path):
    (fault,) = faults_of(tmp_path, FOUR_LINES, "data.validation={split: x}")
    assert 'missing key "path"' in fault


@pytest.mark.parametrize("line", [
    "method: {lora: {rank: 8}, full: {}}", "method: lroa", "model: [1]", "data: 5", "output: 5", "method:",
    "model: null",
])  # fmt: skip
def test_a_fault_of_a_required_key_hides_no_rule_that_spans_other_keys(tmp_path, line):
    key = line.split(":")[0]
    kept = "".join(one + "\n" for one in FOUR_LINES.splitlines() if not one.startswith(f"{key}:"))
    told = faults_of(
        tmp_path,
        f"{kept}{line}\ntrain: {{epochs: 1, steps: 5, learning_rate: 0.1, optimizer: {{name: sgd, beta1: 0.3}}}}\n",
    )
    assert any("both say how long to train" in fault for fault in told)
    assert any("sgd has no beta1" in fault for fault in told)
    assert any(f"run.yaml:4: {key}" in fault for fault in told)
    assert len(told) == 3
