"""The command line: quick help, exit statuses, and the commands that need no model."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from export_cases import TEMPLATE, model_folder

from podtune.cli import main as cli
from podtune.config.errors import Interrupted, RunFailure, UserError

ROOT = Path(__file__).resolve().parent.parent
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def podtune(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would."""
    command = [sys.executable, "-m", "podtune.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120, stdin=subprocess.DEVNULL)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text(CHAT * 3)
    file = tmp_path / "run.yaml"
    file.write_text("model: some/model\ndata: train.jsonl\nmethod: lora\noutput: runs/one\n")
    return file


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_every_help_answers_at_once_and_imports_nothing_heavy(command):
    code = (
        "import sys\n"
        "from podtune.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as done: status = done.code\n"
        "heavy = {'jax', 'numpy', 'transformers', 'torch', 'podtune.config.schema', 'pyarrow'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy)); sys.exit(status)\n"
    )
    arguments = [command, "--help"] if command else ["--help"]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if min(seconds) < 0.5:
            break
    assert done.returncode == 0, done.stderr
    assert "Usage: podtune" in done.stdout
    assert "HEAVY []" in done.stdout
    # Processor time rather than the clock's: other tests run beside this one.
    assert min(seconds) < 0.5


def test_every_command_of_the_table_is_there():
    for name, command in cli.COMMANDS.items():
        assert callable(cli.load(command.place)), name


def test_check_says_that_a_right_file_is_right(run_file):
    done = podtune("check", "run.yaml", "train.steps=3", folder=run_file.parent)
    assert done.returncode == 0, done.stderr
    assert "the configuration is right" in done.stdout
    assert "3 training rows" in done.stdout
    assert "some/model is fetched when the run starts" in done.stdout


def test_check_reports_faults_one_a_line_with_status_2(run_file):
    run_file.write_text(run_file.read_text() + "train:\n  learning_rte: 1e-4\n")
    done = podtune("check", "run.yaml", "seed=x", folder=run_file.parent)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        'run.yaml:6: unknown key "learning_rte", did you mean "learning_rate"?',
        'command line: seed=x: seed: wanted a whole number at least 0 and at most 4294967295, read the text "x"',
        "error: run.yaml has 2 faults",
    ]


def test_check_reports_faults_of_the_data_model_and_output_together(run_file):
    folder = run_file.parent
    (folder / "train.jsonl").write_text(CHAT + '{"messages": [{"role": "user"}]}\n' + CHAT)
    (folder / "taken").write_text("")
    done = podtune("check", "run.yaml", "model=./nowhere", "output=taken", folder=folder)
    assert done.returncode == 2
    assert "train.jsonl:2: " in done.stderr
    assert "./nowhere" in done.stderr
    assert "output: taken is a file" in done.stderr
    assert done.stderr.endswith("error: run.yaml: a run would be refused for this\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("data", ["nowhere.jsonl", "empty.jsonl", "broken.jsonl"])
def test_check_tells_a_missing_an_empty_and_a_broken_source(run_file, data):
    (run_file.parent / "empty.jsonl").write_text("")
    (run_file.parent / "broken.jsonl").write_text('{"messages": [{"role"')
    done = podtune("check", "run.yaml", f"data={data}", folder=run_file.parent)
    assert done.returncode == 2
    assert data in done.stderr
    assert "Traceback" not in done.stderr


def test_check_goes_on_behind_a_broken_line(run_file):
    (run_file.parent / "train.jsonl").write_text('{"messages": [\n' + CHAT + "[]\n" + CHAT + '{"messages": []}\n')
    done = podtune("check", "run.yaml", folder=run_file.parent)
    assert done.returncode == 2
    assert [line.split(":")[1] for line in done.stderr.splitlines() if line.startswith("train.jsonl:")] == [
        "1",
        "3",
        "5",
    ]
    assert "5 training rows" in done.stdout
    assert "3 with faults" in done.stdout


LONG_CHAT = CHAT.replace('"b"', '"a long answer"')
UNKNOWN_ROLE = '{"messages": [{"role": "oracle", "content": "q"}, {"role": "assistant", "content": "a"}]}'


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ('{"messages": [{"role": "user", "content": "q"}]}', (), "train.jsonl:1: nothing to train"),
        (CHAT.replace("assistant", "Assistant"), (), "roles are written in lower case"),
        (UNKNOWN_ROLE, ("model.chat_template=roles.jinja",), "the chat template refuses this conversation: no oracle"),
        (LONG_CHAT, ("data.max_length=8",), "none of 1 row is left for the train split (1 row dropped: longer than"),
        (CHAT, ("method.lora.targets=[nowhere]",), "nowhere"),
        (CHAT, ("data.max_length=100000",), "data.max_length=100,000 is more than the model's context"),
        (CHAT, ("output=occupied",), "output: occupied already holds something else"),
        (CHAT, ("train.batch_tokens=256", "data.max_length=64", "train.accumulate=3"), "does not divide over"),
        (CHAT, ("train.batch_tokens=192", "data.max_length=64", "mesh.fsdp=2"), "does not divide over 2 data shards"),
    ],
)
def test_check_finds_what_the_run_would_refuse_behind_the_form_of_the_rows(run_file, rows, settings, said):
    folder = run_file.parent
    model_folder("llama", folder / "model")
    refusal = "{%- if m.role == 'oracle' %}{{ raise_exception('no oracle') }}{% endif -%}"
    loop = "{% for m in messages %}"
    (folder / "roles.jinja").write_text(TEMPLATE.replace(loop, loop + refusal))
    (folder / "occupied").mkdir()
    (folder / "occupied" / "thesis.tex").write_text("")
    (folder / "train.jsonl").write_text(rows + "\n")
    done = podtune("check", "run.yaml", "model=./model", f"data.cache={folder}/cache", *settings, folder=folder)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_check_says_that_a_batch_is_less_than_a_row_and_takes_the_run_file(run_file):
    folder = run_file.parent
    model_folder("llama", folder / "model")
    settings = ("model=./model", f"data.cache={folder}/cache", "train.batch_tokens=8", "data.max_length=64")
    done = podtune("check", "run.yaml", *settings, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "warning: train.batch_tokens=8 is less than a row of 64 tokens" in done.stdout


def test_check_compares_with_the_run_that_the_output_holds(run_file):
    folder = run_file.parent
    model_folder("llama", folder / "model")
    (folder / "done").mkdir()
    record = {"state": "finished", "model": {"fingerprint": "another"}}
    (folder / "done" / "run.json").write_text(json.dumps(record))
    text = "model: ./model\ndata: train.jsonl\nmethod: lora\noutput: done\n"
    (folder / "done" / "run.yaml").write_text(text)
    run_file.write_text(text)
    done = podtune("check", "run.yaml", f"data.cache={folder}/cache", folder=folder)
    assert done.returncode == 2
    assert "output: done holds a run of another model" in done.stderr
    assert done.stderr.endswith("error: run.yaml: a run would be refused for this\n")


def test_the_command_leaves_torch_out_of_its_process():
    pytest.importorskip("torch", reason="without torch there is none to leave out")
    code = (
        "import sys; from podtune.cli.main import main\n"
        "sys.argv = ['podtune', '--version']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "from transformers import AutoConfig\n"
        "assert sys.modules['torch'] is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_check_leaves_the_data_prepared_and_no_output(run_file):
    folder = run_file.parent
    model_folder("llama", folder / "model")
    done = podtune("check", "run.yaml", "model=./model", f"data.cache={folder}/cache", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "examples" in done.stdout
    assert list((folder / "cache").glob("*/train-*.tfrecord"))
    assert not (folder / "out").exists()


def test_schema_prints_json_and_a_closed_pipe_is_no_error():
    assert json.loads(podtune("schema").stdout)["title"] == "Run"
    piped = subprocess.run(
        f"{sys.executable} -m podtune.cli.main schema | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert piped.stdout == "{\n"
    assert piped.stderr == ""


def test_version_and_mistyped_commands():
    assert podtune("--version").stdout.startswith("podtune ")
    mistyped = podtune("chekc", "run.yaml")
    assert mistyped.returncode == 2
    assert "Did you mean 'check'?" in mistyped.stderr
    assert podtune("check").returncode == 2


def test_a_setting_given_as_an_option_is_told_as_it_is_written():
    given = podtune("run", "run.yaml", "--learning-rate", "1e-4")
    assert given.returncode == 2
    assert "Settings have no dashes: train.learning_rate=…" in given.stderr
    assert "Settings have no dashes: train.learning_rate=…" in podtune("run", "run.yaml", "--lr", "1e-4").stderr


def test_export_shows_a_setting_of_the_export():
    said = podtune("export", "--help").stdout
    assert "export.dtype=bfloat16" in said
    assert "train." not in said
    assert "Settings" not in podtune("run", "run.yaml", "--nothing-known").stderr
    assert "Settings" not in podtune("chat", "run.yaml", "--steps").stderr


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (UserError("the file is wrong"), 2, "error: the file is wrong\n"),
        (RunFailure("the disk is full"), 3, "error: the disk is full\n"),
        (Interrupted("stopped at step 7"), 130, "stopped at step 7\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (PermissionError(13, "Permission denied", "/secret"), 3, "error: Permission denied: /secret\n"),
    ],
)
def test_an_error_becomes_one_message_and_its_exit_status(capsys, raised, status, said):
    def command():
        raise raised

    with pytest.raises(SystemExit) as left:
        cli.with_exit_statuses(command)()
    assert left.value.code == status
    assert capsys.readouterr().err == said


def test_an_unexpected_error_keeps_its_traceback_and_ends_in_status_3(capsys):
    def command():
        raise ZeroDivisionError("division by zero")

    with pytest.raises(SystemExit) as left:
        cli.with_exit_statuses(command)()
    assert left.value.code == 3
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith(
        "error: unexpected ZeroDivisionError: division by zero (a fault of podtune: please report it with the above)\n"
    )


def test_nothing_is_downloaded_before_a_fault_is_told(run_file):
    """A run with a misspelt key ends before anything else: no cache folder, no output folder."""
    cache = run_file.parent / "cache"
    command = [sys.executable, "-m", "podtune.cli.main", "run", "run.yaml", "train.learning_rte=1"]
    environment = {**os.environ, "HF_HOME": str(cache), "PODTUNE_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=run_file.parent, timeout=120, env=environment)
    assert done.returncode == 2, done.stderr
    assert 'did you mean "learning_rate"?' in done.stderr
    assert sorted(path.name for path in run_file.parent.iterdir()) == ["run.yaml", "train.jsonl"]


def test_what_podtune_logs_as_a_warning_is_seen_once(capsys, monkeypatch):
    import logging

    monkeypatch.setattr(logging.getLogger("podtune"), "handlers", [])
    cli.show_warnings()
    cli.show_warnings()
    logging.getLogger("podtune.parallel.sharding").warning("%s=%d does not divide", "heads", 3)
    logging.getLogger("podtune.parallel.sharding").info("not this")
    assert capsys.readouterr().err == "warning: heads=3 does not divide\n"


def test_ctrl_c_before_a_command_has_begun_ends_it_as_it_does_later(run_file):
    program = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'podtune.cli.check':\n"
        "            raise KeyboardInterrupt\n"
        "from podtune.cli.main import main\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "main(['check', 'run.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=run_file.parent, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_name_that_the_terminal_cannot_show_ends_no_command(run_file):
    (run_file.parent / "donn\u00e9es.jsonl").write_text(CHAT)
    given = [sys.executable, "-m", "podtune.cli.main", "check", "run.yaml", "data=donn\u00e9es.jsonl"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(given, cwd=run_file.parent, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "donn\\xe9es.jsonl" in done.stdout


def test_check_refuses_addresses_that_nothing_here_can_reach(run_file):
    given = ["model=foo://bucket/model", "data=foo://bucket/a.jsonl", "output=foo://bucket/out"]
    done = podtune("check", "run.yaml", *given, folder=run_file.parent)
    assert done.returncode == 2
    for address in ("model: foo://bucket/model", "foo://bucket/a.jsonl"):
        assert f"{address}: foo:// is not a kind of address known here" in done.stderr
    assert "output: foo://bucket/out: a run is not kept in foo://" in done.stderr
    assert done.stderr.count("\n") == 4
    done = podtune("check", "run.yaml", "data=hub://a/b/c", folder=run_file.parent)
    assert "a Hub dataset is written hub://owner/name" in done.stderr


def test_check_opens_what_a_run_would_open_of_a_model(run_file):
    model = run_file.parent / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    done = podtune("check", "run.yaml", "model=./model", folder=run_file.parent)
    assert done.returncode == 2
    assert "error: run.yaml: a run would be refused for this" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_stdout_is_no_fault():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m podtune.cli.main schema >&-"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_check_renders_the_chat_template(run_file):
    weights = model_folder("llama", run_file.parent / "model")
    (run_file.parent / "broken.jinja").write_text("{% for message in messages %}{{ message.content }")
    done = podtune("check", "run.yaml", f"model={weights}", "model.chat_template=broken.jinja", folder=run_file.parent)
    assert done.returncode == 2
    assert "model.chat_template: broken.jinja, line 1 of the template: " in done.stderr
    assert "Traceback" not in done.stderr


def test_check_accounts_for_every_tensor_of_a_model_here(run_file):
    from safetensors.numpy import load_file, save_file

    model = model_folder("llama", run_file.parent / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.scale"] = tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors")
    done = podtune("check", "run.yaml", "model=./model", folder=run_file.parent)
    assert done.returncode == 2
    assert "missing: 1 (model.norm.weight)" in done.stderr
    assert "left over: 1 (model.norm.scale)" in done.stderr


def test_data_given_in_the_place_of_a_run_file_is_told_from_it(run_file):
    done = podtune("run", "train.jsonl", folder=run_file.parent)
    assert done.returncode == 2
    assert "train.jsonl: this is data, and no run file. `podtune init train.jsonl`" in done.stderr
