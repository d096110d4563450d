"""Every recipe is a valid run file, opened by what it does, the command and the result to expect."""

import itertools
import json
import re
from pathlib import Path

import pytest

from podtune.config.loading import load_run

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
QUICKSTART = ROOT / "recipes" / "quickstart"


def _chats(name: str) -> list[list[dict[str, str]]]:
    lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_a_valid_run_file(recipe: Path) -> None:
    run = load_run(recipe)
    assert run.output.path
    assert run.model.source


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_opens_with_what_it_does_its_command_and_the_result(recipe: Path) -> None:
    lines = recipe.read_text(encoding="utf-8").splitlines()
    opening = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    assert len(opening) >= 4, "a recipe opens with a comment"
    assert f"podtune run recipes/{recipe.name}" in "\n".join(opening)
    assert "Expect:" in "\n".join(opening)


def test_every_recipe_writes_to_a_folder_of_its_own() -> None:
    outputs = [load_run(recipe).output.path for recipe in RECIPES]
    assert len(set(outputs)) == len(outputs)


def test_quickstart_has_130_training_chats_and_20_held_out() -> None:
    assert len(_chats("train.jsonl")) == 130
    assert len(_chats("held_out.jsonl")) == 20


def test_no_held_out_question_stands_in_the_training_chats() -> None:
    def questions(chats: list[list[dict[str, str]]]) -> list[str]:
        return [_plain(turn["content"]) for chat in chats for turn in chat if turn["role"] == "user"]

    trained, held_out = questions(_chats("train.jsonl")), questions(_chats("held_out.jsonl"))
    assert not set(trained) & set(held_out)
    assert len(set(trained)) == len(trained)


def test_every_held_out_answer_is_one_that_was_taught() -> None:
    taught = {turn["content"] for chat in _chats("train.jsonl") for turn in chat if turn["role"] == "assistant"}
    assert {chat[-1]["content"] for chat in _chats("held_out.jsonl")} <= taught


def test_quickstart_chats_alternate_and_end_with_the_assistant() -> None:
    for chat in _chats("train.jsonl") + _chats("held_out.jsonl"):
        roles = [turn["role"] for turn in chat]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns


def test_quickstart_needs_only_what_the_repository_and_real_inputs_have() -> None:
    run = load_run(ROOT / "recipes" / "quickstart.yaml")
    assert [source.path for source in run.data.train] == ["recipes/quickstart/train.jsonl"]
    assert run.model.source.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", text.lower())
