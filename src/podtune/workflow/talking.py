"""`podtune chat`: opens a model on whatever devices there are and talks."""

from __future__ import annotations

import sys

from podtune.config.errors import UserError
from podtune.serve.chat import Conversation, talk
from podtune.serve.generate import Generator
from podtune.serve.loading import Loaded, load_for_serving, serving_dtype
from podtune.serve.sampling import Sampling


def talk_to(
    source: str, *, prompt: str | None, system: str | None, raw: bool | None, sampling: Sampling, max_new_tokens: int
) -> None:
    """One answer to `prompt`, or a conversation with whoever types or pipes lines in. raw: go on from texts as they
    stand (True), use the chat template (False), or take the form that was trained, the template where that is not known
    (None)."""
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
    form = loaded.form if raw is None else "text" if raw else "chat"
    if raw is False and loaded.tokenizer.chat_template is None:
        raise UserError("--chat needs a chat template, and this model has none. Leave it out to continue plain text.")
    conversation = Conversation(generator, max_new_tokens=max_new_tokens, sampling=sampling, system=system, form=form)
    if sys.stderr.isatty():
        say(f"{loaded.about} on {chosen.platform.upper()}")
    if not conversation.is_chat:
        if system is not None:
            raise UserError(f"--system: {_why_plain(loaded, raw)}, and plain text has no system message. Leave it out.")
        say(f"note: {_why_plain(loaded, raw)}. Each text is gone on from, and nothing is remembered.")
    if prompt is None:
        talk(conversation, source=sys.stdin, out=sys.stdout)
        return
    for piece in conversation.reply(prompt):
        print(piece, end="", flush=True)
    print()


def _why_plain(loaded: Loaded, raw: bool | None) -> str:
    if loaded.tokenizer.chat_template is None:
        return "this model has no chat template, so it continues plain text"
    if raw:
        return "continues plain text, as --raw asks"
    trained = {"completion": "prompts and completions", "text": "plain text"}[str(loaded.form)]
    return f"continues plain text, as this run was trained on {trained} (--chat uses the chat template)"
