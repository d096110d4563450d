"""Chats of 20 to 400 tokens, always the same ones: many short, a few long, as in real sets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

# Common English words; with SmolLM2's tokenizer nearly every one is a single token, so that lengths come out as meant.
_WORDS = (
    "the and of to in is that it was for on are with as his they be at one have this from or had by word but what "
    "some we can out other were all there when up use your how said an each she which do their time if will way "
    "about many then them write would like so these her long make thing see him two has look more day could go come "
    "did number sound no most people my over know water than call first who may down side been now find any new "
    "work part take get place made live where after back little only round man year came show every good me give "
    "our under name very through just form sentence great think say help low line before turn cause same mean "
    "differ move right boy old too does tell set three"
)
# Of the chat template around a question and an answer, default system turn included.
_TEMPLATE_TOKENS = 38
SHORTEST, LONGEST = 20, 400


def write_chats(path: Path, *, count: int, template_tokens: int = _TEMPLATE_TOKENS) -> None:
    """Writes `count` chats as JSONL. Lengths are log-normal about 90 tokens; the answer has two thirds of the words."""
    rng = np.random.default_rng(3)
    vocabulary = _WORDS.split()
    with path.open("w", encoding="utf-8") as file:
        for length in np.clip(rng.lognormal(4.5, 0.7, count), SHORTEST, LONGEST):
            words = rng.choice(vocabulary, max(4, int(length) - template_tokens)).tolist()
            cut = max(1, len(words) // 3)
            turns = (("user", words[:cut]), ("assistant", words[cut:]))
            messages = [{"role": role, "content": " ".join(said)} for role, said in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
