"""prepare: rows become packed TFRecord shards with nothing lost unsaid, under a name that only what matters changes."""

import io
import json
import shutil
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizers import family_tokenizer
from prepare_cases import all_rows, chat, chats, examples_of, prepare_chats, write_rows
from rich.console import Console

from podtune.config.errors import RunFailure, UserError
from podtune.config.rows import Data
from podtune.data.chat import NOTES, encode_row
from podtune.data.prepare import prepare
from podtune.data.prepare_report import PrepareReport, SourceReport, Tally
from podtune.data.rows import Conversation, Message, Row


def tokens_of(row: dict) -> list[int]:
    messages = tuple(Message(message["role"], message["content"]) for message in row["messages"])
    return encode_row(Row("", 1, Conversation(messages)), family_tokenizer("chatml")).tokens.tolist()


def test_every_row_is_in_exactly_one_split_once_as_the_template_has_it(tmp_path: Path) -> None:
    rows = chats(60)
    prepared = prepare_chats(tmp_path, write_rows(tmp_path / "a.jsonl", rows))
    train, validation = examples_of(prepared), examples_of(prepared, "validation")
    assert sorted(train + validation) == sorted(map(tokens_of, rows))
    assert len(validation) == 3  # 5 %
    assert prepared.train.examples == 57
    assert prepared.train.tokens == sum(map(len, train))


def test_counts_of_tokens_are_those_of_the_rows_on_disk(tmp_path: Path) -> None:
    prepared = prepare_chats(tmp_path, write_rows(tmp_path / "a.jsonl", chats(40)))
    rows = [prepared.train.read(index) for index in range(prepared.train.rows)]
    assert sum(len(row.tokens) for row in rows) == prepared.train.tokens
    assert sum(int(row.trained.sum()) for row in rows) == prepared.train.trained_tokens
    assert prepared.train.efficiency == prepared.train.tokens / (len(rows) * prepared.train.row_tokens)
    starts = [np.flatnonzero(np.diff(row.segments, prepend=0)) for row in rows]
    assert not any(row.trained[begin].any() for row, begin in zip(rows, starts, strict=True))


def test_without_packing_each_example_has_a_row_no_longer_than_needed(tmp_path: Path) -> None:
    data = {"train": str(write_rows(tmp_path / "a.jsonl", chats(10))), "packing": False, "validation": "none"}
    prepared = prepare_chats(tmp_path, data, max_length=4096)
    assert prepared.train.rows == prepared.train.examples == 10
    assert prepared.train.row_tokens % 64 == 0
    assert prepared.train.row_tokens - 64 < prepared.report.longest <= prepared.train.row_tokens


def test_a_small_data_set_makes_about_a_hundred_rows_unless_a_length_is_asked_for(tmp_path: Path) -> None:
    data = {"train": str(write_rows(tmp_path / "a.jsonl", chats(700))), "validation": "none"}
    prepared = prepare_chats(tmp_path, data, max_length=4096)
    assert 90 <= prepared.train.rows <= 110
    assert prepared.train.row_tokens >= prepared.report.longest
    asked = prepare_chats(tmp_path, data | {"max_length": 4096}, max_length=4096)
    assert asked.train.row_tokens == 4096
    assert asked.fingerprint != prepared.fingerprint
    few = prepare_chats(tmp_path, data | {"train": str(write_rows(tmp_path / "b.jsonl", chats(30)))}, max_length=4096)
    assert few.train.row_tokens - 64 < few.report.longest <= few.train.row_tokens


def test_every_broken_line_of_jsonl_is_told_with_the_rows_that_cannot_be_trained_on(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in chats(6)]
    lines[1:1] = ["{'messages': []}"]
    lines[4:4] = ["not JSON"]
    lines.append(json.dumps({"messages": [{"role": "user", "content": "only asked"}]}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError) as caught:
        prepare_chats(tmp_path, tmp_path / "a.jsonl")
    told = str(caught.value)
    assert told.startswith("3 rows of 9 read cannot be trained on.")
    assert f"{tmp_path}/a.jsonl:2: not valid JSON in column 2: single quotes are not JSON" in told
    assert f"{tmp_path}/a.jsonl:5: not valid JSON in column 1" in told
    assert f"{tmp_path}/a.jsonl:9: nothing to train" in told


def test_the_second_time_nothing_is_done_and_that_is_said(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(200))
    first = prepare_chats(tmp_path, path)
    said = io.StringIO()
    began = time.monotonic()
    second = prepare_chats(tmp_path, path, progress=Console(file=said, width=300))
    assert time.monotonic() - began < 0.5
    assert (first.reused, second.reused) == (False, True)
    assert "nothing to do" in said.getvalue()
    assert second.report == first.report
    assert all_rows(second) == all_rows(first)


def test_the_report_speaks_of_the_files_of_this_run(tmp_path: Path) -> None:
    """Equal bytes under another name are found prepared, but the places told are those that the user can open."""
    rows = [*chats(20), chat("Long?", "word " * 400)]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_SUCCESS").touch()
        write_rows(tmp_path / name / f"{name}.jsonl", rows)
    prepare_chats(tmp_path, tmp_path / "first")
    found = prepare_chats(tmp_path, tmp_path / "second")
    assert found.reused
    (source,) = found.report.sources
    file = tmp_path / "second" / "second.jsonl"
    assert (source.name, source.files) == (str(tmp_path / "second"), (str(file),))
    assert source.dropped.places == {"longer than max_length": [f"{file}:21"]}
    assert "first" not in str(found.report)
    assert f"{tmp_path / 'second'}: not read: names that begin with . or _: 1 (_SUCCESS)" in found.report.notes


@pytest.mark.parametrize("count", [1, 2])
def test_a_note_on_rows_reads_well_for_one_and_for_many(count: int) -> None:
    for words in NOTES.values():
        assert words.split()[0] in ("with", "without")
    source = SourceReport("a", noted=Tally({"reasoning_left_out": count}, {"reasoning_left_out": ["a.jsonl:1"]}))
    said = str(PrepareReport((source,), (), 1).lines()[1])
    assert said.startswith(f"a: {count} row{'s' if count > 1 else ''} with reasoning that the chat template leaves out")


def test_a_moved_file_with_the_same_bytes_is_known(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    first = prepare_chats(tmp_path, path)
    moved = path.rename(tmp_path / "b.jsonl")
    second = prepare_chats(tmp_path, moved)
    assert (second.reused, second.fingerprint) == (True, first.fingerprint)


def test_a_changed_byte_is_other_data_though_size_and_time_say_nothing(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    first = prepare_chats(tmp_path, path)
    path.write_text(path.read_text().replace("The answer is 7", "The answer is 8"))
    assert prepare_chats(tmp_path, path).fingerprint != first.fingerprint


def test_whatever_changes_a_row_changes_the_fingerprint(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "a.jsonl", chats(30)))
    settings = [
        {},
        {"train_on": "last"},
        {"too_long": "truncate"},
        {"packing": False},
        {"deduplicate": True},
        {"validation": 4},
        {"train": [{"path": path, "weight": 2.0}]},
        {"columns": {"messages": "messages"}},
    ]
    fingerprints = [prepare_chats(tmp_path, {"train": path, **each}).fingerprint for each in settings]
    fingerprints.append(prepare_chats(tmp_path, path, max_length=100).fingerprint)
    fingerprints.append(prepare_chats(tmp_path, path, seed=1).fingerprint)
    other = prepare(Data.model_validate(path), family_tokenizer("qwen3"), max_length=128, cache=tmp_path / "cache")
    assert len({*fingerprints, other.fingerprint}) == len(fingerprints) + 1
    # how many processes work on it is not what it is
    assert prepare_chats(tmp_path, {"train": path, "workers": 0}).fingerprint == fingerprints[0]


def test_processes_write_the_same_bytes_as_one_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podtune.data.prepare_inputs._CHUNK_ROWS", 40)
    path = write_rows(tmp_path / "a.jsonl", chats(150))
    alone = prepare_chats(tmp_path / "alone", {"train": str(path), "workers": 0})
    together = prepare_chats(tmp_path / "together", {"train": str(path), "workers": 2})
    names = sorted(file.name for file in alone.folder.glob("*.tfrecord*"))
    assert names
    for name in names:
        assert (alone.folder / name).read_bytes() == (together.folder / name).read_bytes()
    assert sorted(file.name for file in together.folder.parent.iterdir() if file.is_dir()) == [together.folder.name]


def test_many_shards_read_as_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(60))
    one = prepare_chats(tmp_path / "one", path)
    monkeypatch.setattr("podtune.data.prepare_write._SHARD_TOKENS", 256)
    many = prepare_chats(tmp_path / "many", path)
    assert len(many.train.shard_rows) > 3
    assert all_rows(many) == all_rows(one)


def test_rows_too_long_are_dropped_and_named(tmp_path: Path) -> None:
    rows = [*chats(20), chat("Long?", "word " * 400)]
    prepared = prepare_chats(tmp_path, write_rows(tmp_path / "a.jsonl", rows))
    source = prepared.report.sources[0]
    assert (source.read, source.kept, source.dropped.total) == (21, 20, 1)
    printed = io.StringIO()
    prepared.report.print(Console(file=printed, width=300))
    assert f"1 row dropped: longer than max_length ({tmp_path}/a.jsonl:21)" in printed.getvalue()


def test_a_truncated_row_keeps_its_beginning_and_one_whose_answer_would_go_is_dropped(tmp_path: Path) -> None:
    """Pitfall 37 and LlamaFactory#3995, #1136: nothing is trained on nothing."""
    rows = [chat("Short?", "word " * 400), chat("word " * 400, "Never seen.")]
    data = {"train": str(write_rows(tmp_path / "a.jsonl", rows)), "too_long": "truncate", "validation": "none"}
    prepared = prepare_chats(tmp_path, data)
    assert examples_of(prepared) == [tokens_of(rows[0])[:128]]
    source = prepared.report.sources[0]
    assert (source.kept, source.changed.total, source.dropped.total) == (1, 1, 1)
    printed = io.StringIO()
    prepared.report.print(Console(file=printed, width=300))
    assert f"max_length would cut the answer away entirely ({tmp_path}/a.jsonl:2)" in printed.getvalue()
    assert f"1 row cut to max_length ({tmp_path}/a.jsonl:1)" in printed.getvalue()


def test_refuse_names_the_long_rows(tmp_path: Path) -> None:
    rows = [*chats(3), chat("Long?", "word " * 400)]
    data = {"train": str(write_rows(tmp_path / "a.jsonl", rows)), "too_long": "refuse"}
    with pytest.raises(UserError, match=r"a\.jsonl:4: \d+ tokens, max_length is 128"):
        prepare_chats(tmp_path, data)


def test_a_long_document_is_split_so_that_every_token_is_a_target_once(tmp_path: Path) -> None:
    text = " ".join(f"word{n}" for n in range(300))
    path = write_rows(tmp_path / "a.jsonl", [{"text": text}])
    data = {"train": str(path), "too_long": "truncate", "validation": "none"}
    prepared = prepare_chats(tmp_path, data, max_length=50)
    whole = prepare_chats(tmp_path, {"train": str(path), "validation": "none"}, max_length=10_000)
    (document,) = examples_of(whole)
    assert prepared.train.trained_tokens == whole.train.trained_tokens == len(document) - 1
    pairs = sorted(pair for piece in examples_of(prepared) for pair in pairwise(piece))
    assert pairs == sorted(pairwise(document))
    assert prepared.report.sources[0].changed.total == 1


def test_rows_with_nothing_to_train_are_refused_by_name(tmp_path: Path) -> None:
    """Pitfall 3: the first five and how many there are, and nothing is kept of them."""
    silent = [{"messages": [{"role": "user", "content": f"Anyone, {n}?"}]} for n in range(7)]
    path = write_rows(tmp_path / "a.jsonl", [*chats(5), *silent])
    with pytest.raises(UserError) as refusal:
        prepare_chats(tmp_path, path)
    message = str(refusal.value)
    assert refusal.value.exit_status == 2
    assert "7 rows with nothing to train on" in message
    assert [line for line in range(1, 13) if f"a.jsonl:{line}:" in message] == [6, 7, 8, 9, 10]
    assert "… and 2 more" in message
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]


def test_rows_of_the_wrong_form_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*chats(20), {"messages": 3}])
    with pytest.raises(UserError, match=r"a\.jsonl:21: "):
        prepare_chats(tmp_path, path)


def test_nothing_left_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [chat("Long?", "word " * 400)])
    with pytest.raises(UserError, match=r"none of 1 row is left.*too_long: truncate"):
        prepare_chats(tmp_path, path)
    question = write_rows(tmp_path / "b.jsonl", [chat("word " * 400, "Yes.")])
    with pytest.raises(
        UserError, match=r"cut the answer away entirely\)\. max_length is \d+: raise data\.max_length\.$"
    ):
        prepare_chats(tmp_path, {"train": str(question), "too_long": "truncate"})
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        prepare_chats(tmp_path, tmp_path / "empty.jsonl")


def test_equal_rows_are_counted_and_on_request_dropped(tmp_path: Path) -> None:
    rows = [*chats(10), *chats(4)]
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    kept = prepare_chats(tmp_path, {"train": path, "validation": "none"})
    assert kept.train.examples == 14
    assert any("equal to an earlier row: 4 rows" in note for note in kept.report.notes)
    dropped = prepare_chats(tmp_path, {"train": path, "validation": "none", "deduplicate": True})
    assert dropped.train.examples == 10
    source = dropped.report.sources[0]
    assert (source.read, source.kept, source.dropped.total) == (14, 10, 4)
    assert source.dropped.places["equal to an earlier row"][0].endswith("a.jsonl:11")


def test_a_weight_is_the_passes_of_an_epoch_over_a_source(tmp_path: Path) -> None:
    one, *others = chats(20), *([chat(f"{name} {n}?", "Yes.") for n in range(20)] for name in ("Other", "Rare"))
    data = {
        "train": [
            {"path": str(write_rows(tmp_path / "a.jsonl", one)), "weight": 2.5},
            {"path": str(write_rows(tmp_path / "b.jsonl", others[0])), "weight": 0.25},
            {"path": str(write_rows(tmp_path / "c.jsonl", others[1])), "weight": 0.01},
        ],
        "validation": "none",
    }
    prepared = prepare_chats(tmp_path, data)
    found = examples_of(prepared)
    times = [[found.count(tokens_of(row)) for row in rows] for rows in (one, *others)]
    assert sorted(times[0]) == [2] * 10 + [3] * 10
    assert sorted(times[1]) == [0] * 15 + [1] * 5
    assert sorted(times[2]) == [0] * 19 + [1]  # never none of a source
    left = [note.rpartition(": ")[2] for note in prepared.report.notes if "trains on" in note]
    assert left == ["weight 0.25 trains on 5 of 20 rows", "weight 0.01 trains on 1 of 20 rows"]


def test_held_out_rows_are_not_trained_on_and_equal_rows_stay_on_one_side(tmp_path: Path) -> None:
    rows = [row for row in chats(50) for _ in range(2)]
    prepared = prepare_chats(tmp_path, {"train": str(write_rows(tmp_path / "a.jsonl", rows)), "validation": 10})
    train, validation = examples_of(prepared), examples_of(prepared, "validation")
    assert (len(train), len(validation)) == (90, 10)
    assert not {tuple(example) for example in train} & {tuple(example) for example in validation}


@pytest.mark.parametrize(("given", "held_out"), [(7, 7), (0.2, 8), ("none", 0), ("auto", 2)])
def test_as_many_rows_are_held_out_as_asked(tmp_path: Path, given: object, held_out: int) -> None:
    path = str(write_rows(tmp_path / "a.jsonl", chats(40)))
    prepared = prepare_chats(tmp_path, {"train": path, "validation": given})
    assert (prepared.validation.examples if prepared.validation else 0) == held_out
    assert prepared.train.examples == 40 - held_out


def test_too_few_rows_for_an_automatic_split_train_without_one_and_say_so(tmp_path: Path) -> None:
    prepared = prepare_chats(tmp_path, write_rows(tmp_path / "a.jsonl", chats(3)))
    assert prepared.validation is None
    assert any("no validation split" in note for note in prepared.report.notes)
    assert prepared.held_out_prompts(3) == []
    text = tmp_path / "manual.txt"
    text.write_text("One paragraph.\n\nAnother one.\n")
    (note,) = [note for note in prepare_chats(tmp_path, text).report.notes if "no validation split" in note]
    assert f"{{path: {text}, documents: paragraph}} makes one of each paragraph" in note
    with pytest.raises(UserError, match=r"none of 1 row is left .*documents: paragraph\} makes one of each paragraph"):
        prepare_chats(tmp_path, {"train": str(text), "validation": "none"}, max_length=8)


def test_pairs_that_run_together_are_said_once_for_a_source_where_all_do(tmp_path: Path) -> None:
    def said(*pairs: tuple[str, str]) -> str:
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
        console = Console(file=io.StringIO(), width=400)
        data = {"train": str(write_rows(tmp_path / "a.jsonl", rows)), "validation": "none"}
        prepare_chats(tmp_path, data).report.print(console)
        return console.file.getvalue()

    assert "2 rows with no space or line break between prompt and completion" in said(
        ("no light", "power"), ("wet", "water")
    )
    assert "put prompt and completion" not in said(("no light", "power"), ("wet ", "water"))


def test_a_source_may_have_no_columns_named_where_the_others_have(tmp_path: Path) -> None:
    named = write_rows(tmp_path / "named.jsonl", [{"text": "from text", "prompt": "p", "completion": "c", "body": "b"}])
    usual = write_rows(tmp_path / "usual.jsonl", [{"prompt": "p", "completion": " c"}])
    data = {
        "train": [str(named), {"path": str(usual), "columns": {}}], "columns": {"text": "body"}, "validation": "none",
    }  # fmt: skip
    notes = prepare_chats(tmp_path, data).report.notes
    assert [note.split(": ")[1].split(" ")[0] for note in notes] == ["text", "prompt_completion"]


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "a.jsonl", chats(5)))
    with pytest.raises(UserError, match=r"data\.validation=5 holds out 5 of 5 rows"):
        prepare_chats(tmp_path, {"train": path, "validation": 5})


def test_validation_rows_of_their_own_are_used_and_their_overlap_is_said(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.jsonl", chats(10))
    validation = write_rows(tmp_path / "b.jsonl", [*chats(2), chat("New?", "Yes.")])
    prepared = prepare_chats(tmp_path, {"train": str(train), "validation": str(validation)})
    assert prepared.train.examples == 10
    assert prepared.validation is not None
    assert prepared.validation.examples == 3
    assert "2 validation rows are also trained on" in prepared.report.notes


def test_held_out_prompts_end_where_the_answer_begins(tmp_path: Path) -> None:
    rows = chats(40)
    prepared = prepare_chats(tmp_path, {"train": str(write_rows(tmp_path / "a.jsonl", rows)), "validation": 4})
    prompts = prepared.held_out_prompts(10)
    assert len(prompts) == 4
    assert prompts == prepare_chats(tmp_path, {"train": str(tmp_path / "a.jsonl"), "validation": 4}).held_out_prompts(9)
    held_out = examples_of(prepared, "validation")
    for prompt in prompts:
        assert any(tokens[: len(prompt.prompt_ids)] == prompt.prompt_ids for tokens in held_out)
        assert prompt.prompt_text.endswith("<|im_start|>assistant\n")
        assert any(row["messages"][1]["content"] == prompt.expected_text for row in rows)
        assert [message["role"] for message in prompt.messages][-1] == "user"


def test_documents_are_prompted_with_their_beginning(tmp_path: Path) -> None:
    texts = [{"text": f"Chapter {n}. How are you today? I am fine, thank you."} for n in range(40)]
    prepared = prepare_chats(tmp_path, write_rows(tmp_path / "a.jsonl", texts))
    (prompt, *_) = prepared.held_out_prompts(1)
    assert prompt.prompt_text.startswith("Chapter ")
    assert any(text["text"].startswith(prompt.prompt_text) for text in texts)
    assert prompt.expected_text


def test_tfrecords_of_others_are_rows_like_any(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")

    def example(features: dict[str, list[int]]) -> bytes:
        lists = {
            name: tensorflow.train.Feature(int64_list=tensorflow.train.Int64List(value=values))
            for name, values in features.items()
        }
        return tensorflow.train.Example(features=tensorflow.train.Features(feature=lists)).SerializeToString()

    with tensorflow.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for n in range(6):
            writer.write(example({"tokens": [1, 2, 3, 4 + n], "trained": [0, 0, 1, 1]}))
    prepared = prepare_chats(tmp_path, {"train": str(tmp_path / "a.tfrecord"), "validation": "none"})
    assert examples_of(prepared) == [[1, 2, 3, 4 + n] for n in range(6)]
    assert prepared.train.trained_tokens == 12


def test_prepared_shards_can_be_the_input_of_another_preparation(tmp_path: Path) -> None:
    first = prepare_chats(tmp_path, {"train": str(write_rows(tmp_path / "a.jsonl", chats(20))), "validation": "none"})
    shards = str(first.folder / "train-*.tfrecord")
    again = prepare_chats(tmp_path, {"train": shards, "validation": "none"})
    assert examples_of(again) == examples_of(first)
    assert again.train.trained_tokens == first.train.trained_tokens


def test_a_folder_without_a_manifest_is_not_there_and_one_with_a_shard_missing_is_damaged(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    first = prepare_chats(tmp_path, path)
    rows = all_rows(first)
    (first.folder / "manifest.json").unlink()
    second = prepare_chats(tmp_path, path)
    assert not second.reused
    assert all_rows(second) == rows
    next(second.folder.glob("train-*.tfrecord")).unlink()
    with pytest.raises(RunFailure, match="is missing"):
        prepare_chats(tmp_path, path)
    shutil.rmtree(second.folder)
    assert all_rows(prepare_chats(tmp_path, path)) == rows


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fingerprint": 1, "splits": [], "report": null}', "[" * 99999])
def test_a_damaged_manifest_is_told_with_a_way_out(tmp_path: Path, content: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    prepared = prepare_chats(tmp_path, path)
    (prepared.folder / "manifest.json").write_text(content)
    with pytest.raises(RunFailure, match=r"manifest\.json .*Delete the folder to prepare anew"):
        prepare_chats(tmp_path, path)


@pytest.mark.parametrize("content", ["", "{}", "[5]", None])
def test_damaged_prompts_and_indexes_of_prepared_data_are_told_with_a_way_out(tmp_path: Path, content: str | None):
    prepared = prepare_chats(tmp_path, write_rows(tmp_path / "a.jsonl", chats(40)))
    (index,) = prepared.folder.glob("train-*.idx.npy")
    for file in (prepared.folder / "held_out.json", index):
        file.unlink()
        if content is not None:
            file.write_text(content)
    with pytest.raises(RunFailure, match=r"held_out\.json cannot be read .*Delete the folder"):
        prepared.held_out_prompts(1)
    with pytest.raises(RunFailure, match=r"idx\.npy: the index cannot be read .*Delete the folder"):
        prepare_chats(tmp_path, tmp_path / "a.jsonl").train.read(0)


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"a": 5}'])
def test_hashes_that_cannot_be_read_are_found_out_again(tmp_path: Path, content: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    first = prepare_chats(tmp_path, path)
    (tmp_path / "cache" / "hashes.json").write_text(content)
    assert prepare_chats(tmp_path, path).fingerprint == first.fingerprint


def test_the_manifest_tells_what_the_data_was_made_from(tmp_path: Path) -> None:
    prepared = prepare_chats(tmp_path, write_rows(tmp_path / "a.jsonl", chats(20)))
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert manifest["fingerprint"] == prepared.fingerprint
    assert manifest["fingerprint"].startswith(prepared.folder.name)
    assert manifest["settings"]["max_length"] == 128
