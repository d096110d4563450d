"""`podtune chat`: opens a model on whatever devices there are and talks."""

from __future__ import annotations

import sys

from podtune.config.errors import UserError
from podtune.serve.chat import Conversation, talk
from podtune.serve.generate import Generator
from podtune.serve.loading import load_for_serving, serving_dtype
from podtune.serve.sampling import Sampling


def talk_to(source: str, *, prompt: str | None, system: str | None, sampling: Sampling, max_new_tokens: int) -> None:
    """One answer to `prompt`, or a conversation with whoever types or pipes lines in."""
    from podtune.parallel.devices import choose_platform
    from podtune.train.cache import enable_compile_cache

    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens} leaves no room for an answer. Use at least 1.")
    if prompt is not None and not prompt.strip():
        raise UserError("--prompt is empty. Write something to answer.")
    chosen = choose_platform()
    enable_compile_cache()

    def say(text: str) -> None:  # beside the answers, not among them
        print(text, file=sys.stderr)

    loaded = load_for_serving(source, say=say)
    mesh = loaded.mesh
    generator = Generator(loaded.model, loaded.weights, loaded.tokenizer, compute_dtype=serving_dtype(mesh), mesh=mesh)
    conversation = Conversation(generator, max_new_tokens=max_new_tokens, sampling=sampling, system=system)
    if sys.stderr.isatty():
        say(f"{loaded.about} on {chosen.platform.upper()}")
    if not conversation.is_chat:
        say("note: this model has no chat template, so it goes on from each text and remembers nothing.")
    if prompt is None:
        talk(conversation, source=sys.stdin, out=sys.stdout)
        return
    for piece in conversation.reply(prompt):
        print(piece, end="", flush=True)
    print()
