"""What is done with a run after it has trained: `podtune export` and `podtune eval`, with nothing asked again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from podtune.config.errors import UserError
from podtune.config.schema import Run
from podtune.train.job import check_validation
from podtune.workflow import beginning, finishing, training
from podtune.workflow.identity import fingerprints
from podtune.workflow.output import OutputFolder, claimed, has_checkpoint, is_output_folder, open_output, refuse_remote
from podtune.workflow.work import Work
from podtune.workflow.writing import shown_writing

if TYPE_CHECKING:
    from podtune.train.restore import Restored

DTYPES = ("float32", "bfloat16", "float16")


def export_run(
    output: OutputFolder, console: Console, *, dtype: str | None = None, overrides: Sequence[str] = ()
) -> None:
    """Exports the run's checkpoint once more, checks it, and writes report and model card anew. overrides: other
    settings of the export than the run file had."""
    from podtune.serve.loading import recorded_form

    run = _with_dtype(output.load_run(overrides), dtype)
    run = run.model_copy(update={"output": run.output.model_copy(update={"path": str(output.path)})})
    with claimed(run) as output:
        trained = output.has_reached("trained")
        work = Work(run, console, output)
        work.timings |= output.record.get("timings", {})  # those of training stay in the report
        work.warnings += output.record.get("warnings", [])
        beginning.open_model(work)
        open_data(work)
        work.form = recorded_form(output.path)
        check_validation(run, work.prepared.validation)
        beginning.choose_devices(work)
        training.say_again(work, load_trained(work))
        work.merged_too = run.export.merged or bool(_warnings(work))
        finishing.export_model(work)
        finishing.check_exported(work)
        finishing.write_report(work)
        output.take(run)  # its settings of the export are those of the run from here on
        if trained:
            output.reach("finished")
        else:
            work.say(f"its training is not finished: `podtune run {output.path}/run.yaml` goes on with it")
        output.publish(whole=True)


def convert_model(source: str, to: Path, console: Console, *, dtype: str | None = None) -> None:
    """Any model that podtune reads, its adapter merged, as a Hugging Face folder."""
    from podtune.config.wording import readable_bytes
    from podtune.export.huggingface import write_model
    from podtune.parallel.devices import choose_platform
    from podtune.serve.loading import load_for_serving

    _check_dtype(dtype)
    if is_output_folder(Path(source)):
        raise UserError(f"{source} is a run's output: `podtune export {source}` writes into it, without --to.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} already holds something. Name a folder that does not exist yet.")
    choose_platform()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    loaded = load_for_serving(source, say=say)
    stated = loaded.files.config.get("dtype") or loaded.files.config.get("torch_dtype")
    with shown_writing(console, to) as progress:
        written = write_model(
            to,
            loaded.model,
            loaded.weights,
            loaded.tokenizer,
            dtype=dtype or (stated if stated in DTYPES else "float32"),
            generation_config=loaded.files.generation_config,
            progress=progress,
        )
    if written.lost:
        say(f"warning: {written.lost}")
    say(f"exported {to}: {written.tensors} tensors, {readable_bytes(written.bytes)}, {written.dtype}")


def evaluate_run(run: Run, console: Console) -> dict[str, Any]:
    """Held-out loss and perplexity, and answers to the run's prompts, of its checkpoint or of the untrained model.

    Returns them as JSON has them: step, loss, perplexity, tokens, and answers with prompt, answer and expected.
    """
    from podtune.train.evaluation import evaluate
    from podtune.train.feed import loader_for
    from podtune.train.geometry import evaluation_geometry
    from podtune.train.program import make_program
    from podtune.workflow.samples import answer_all

    refuse_remote(run.output.path, command="eval")
    output = open_output(Path(run.output.path)) if is_output_folder(Path(run.output.path)) else None
    work = Work(run, console, output or OutputFolder(Path(run.output.path)))
    trained = output is not None and has_checkpoint(output.path)
    if not trained:
        if output is not None and output.has_reached("trained"):
            raise UserError(f"{output.path}: this run has trained, and its checkpoints are gone. Evaluate another.")
        work.say(f"{run.output.path}: nothing is trained there yet; {run.model.source} is evaluated as it is")
    beginning.open_model(work)
    training.check_prompts(work)
    beginning.prepare_data(work)
    split = work.prepared.validation
    if split is None:
        raise UserError("data.validation: no rows are held out to evaluate on. Name some, or a fraction of the rows.")
    beginning.choose_devices(work)
    if trained:
        step = load_trained(work).step
    else:
        beginning.load_model(work)
        step = 0
    geometry = evaluation_geometry(rows=split.rows, row_tokens=split.row_tokens, mesh=work.mesh)
    training.choose_samples(work)
    work.generator.weights = work.weights
    answers = answer_all(work.generator, work.prompts, max_new_tokens=run.eval.max_new_tokens) if work.prompts else []
    program, trainable = make_program(
        run, work.model, work.description, weights=work.weights, mesh=work.mesh, geometry=geometry
    )
    loader = loader_for(split, work.mesh, seed=run.seed, batch_rows=geometry.micro_rows, once=True)
    seen = evaluate(program.eval_step, trainable, program.frozen, loader, work.mesh)
    for prompt, said in zip(work.prompts, answers, strict=True):
        work.say(f"        Q: {prompt.text}\n   answer: {said}")
        if prompt.expected:
            work.say(f" expected: {prompt.expected}")
        work.say("")
    which = f"step {step} of {run.output.path}" if trained else f"{run.model.source}, untrained"
    work.say(f"{which}: held-out loss {seen.loss:.4f}, perplexity {seen.perplexity:.2f} on {seen.tokens:,} tokens")
    return {
        "step": step,
        "loss": beginning.finite(seen.loss),
        "perplexity": beginning.finite(seen.perplexity),
        "tokens": seen.tokens,
        "answers": [
            {"prompt": prompt.text, "answer": said, "expected": prompt.expected}
            for prompt, said in zip(work.prompts, answers, strict=True)
        ],
    }


def open_data(work: Work) -> None:
    """The data as the run prepared it, where that is still there: its files need not be."""
    from podtune.data.prepared import open_prepared

    record = work.output.record.get("data") or {}
    found = open_prepared(Path(record["folder"])) if record.get("folder") else None
    if found is not None and found.fingerprint == record.get("fingerprint"):
        work.prepared = found
    else:
        beginning.prepare_data(work)


def load_trained(work: Work) -> Restored:
    """The model with what the run has trained in it. Where that is all of it, the model it started from is not read."""
    if work.run.method.lora is None:
        work.weights = work.description
    else:
        beginning.load_model(work)
    return restore(work)


def restore(work: Work) -> Restored:
    """Puts what the run has trained in the place of the weights it started from."""
    from podtune.train.restore import restore_weights

    now = fingerprints(work)
    restored = restore_weights(work.run, work.description, work.weights, mesh=work.mesh, fingerprints=now)
    work.weights = restored.weights
    work.say(f"weights of step {restored.step} of {work.output.path}")
    if restored.notes["identity"].get("data") != now["data"]:
        work.warn(
            "the data is not what these weights were trained on: its held-out rows may be among those trained on."
        )
    return restored


def _warnings(work: Work) -> tuple[str, ...]:
    from podtune.export.peft import serving_warnings

    return serving_warnings(work.model, work.description) if work.run.exports_adapter else ()


def _with_dtype(run: Run, dtype: str | None) -> Run:
    _check_dtype(dtype)
    return run if dtype is None else run.model_copy(update={"export": run.export.model_copy(update={"dtype": dtype})})


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}.")
