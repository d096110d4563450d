"""The stages of training: answers before, the loop with answers during, answers after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from podtune.config.errors import RunFailure
from podtune.config.wording import counted
from podtune.data.forms import trained_form
from podtune.parallel.mesh import platform_of
from podtune.serve.prompts import takes_chats
from podtune.train.evaluation import perplexity
from podtune.train.job import Event, Hooks, Job, check_validation
from podtune.train.metrics import read_metrics
from podtune.train.program import chosen_dtype
from podtune.workflow.beginning import finite, shown_console
from podtune.workflow.identity import fingerprints
from podtune.workflow.samples import answer_all, choose_prompts, own_prompts, record_answers
from podtune.workflow.work import Work

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from podtune.train.restore import Restored


def train_model(work: Work) -> None:
    """Trains, answering the chosen prompts before the first step and at every evaluation."""
    from podtune.train.loop import train

    choose_samples(work)
    work.output.update(data=data_record(work), model=model_record(work))

    def on_samples(weights: Any, step: int, label: str) -> None:
        if label != "after":  # those are given with the weights that are kept, which may be an earlier step's
            answer(work, weights, step=step, moment="before" if step == 0 else f"step {step}")

    def on_event(event: Event) -> None:
        if event.kind in ("skip", "rollback", "stop", "few steps"):
            work.warnings.append(event.text)

    job = Job(
        run=work.run,
        model=work.model,
        description=work.description,
        weights=work.weights,
        mesh=work.mesh,
        train_split=work.prepared.train,
        validation_split=work.prepared.validation,
        output=work.run.output.path,
        fingerprints=fingerprints(work),
        console=shown_console(work),
    )
    work.weights = None  # the loop takes them over
    work.result = train(job, Hooks(on_samples=on_samples, on_event=on_event))
    if 0 < work.result.steps == work.result.skipped:
        raise RunFailure(
            f"None of the {work.result.steps} steps was taken: each had a loss or gradient that is not finite, or "
            "nothing to train. Nothing was learned, and nothing is exported. Look at the weights of the model, at "
            "train.learning_rate and at the data (podtune inspect), and start anew with --fresh."
        )
    if work.result.weights_step == 0:
        work.warn(
            "no step lowered the validation loss, so the best weights are those before training: what is exported is "
            "the model as it came. Lower train.learning_rate, or look at the data (podtune inspect)."
        )
    work.weights = work.result.weights
    work.output.reach("trained", results=results_record(work))
    work.output.publish(whole=False)


def check_steps(work: Work) -> None:
    """Raises UserError for settings of training that do not fit the data or the mesh, while nothing is written yet."""
    check_validation(work.run, work.prepared.validation)
    warn_of_short_batch(work)
    if work.output.anew:  # a run that is gone on with keeps its batches
        plan_steps(work, work.mesh)


def warn_of_short_batch(work: Work) -> None:
    """Says so where a batch is asked for that is less than a row. How long rows are is known once there are some."""
    asked, row = work.run.train.batch_tokens, work.prepared.train.row_tokens
    if isinstance(asked, int) and asked < row:
        work.warn(
            f"train.batch_tokens={asked:,} is less than a row of {row:,} tokens: a step takes whole rows. Shorten them "
            "with data.max_length for smaller steps."
        )


def plan_steps(work: Work, mesh: Mesh | AbstractMesh) -> None:
    """Warns where the steps asked for end before all rows were seen. Raises UserError where batches do not divide."""
    from podtune.train.geometry import plan_geometry

    split, steps = work.prepared.train, work.run.train.steps
    plan = plan_geometry(work.run.train, rows=split.rows, row_tokens=split.row_tokens, mesh=mesh)
    seen = plan.batch_rows * plan.total_steps
    if steps is not None and seen < split.rows:
        work.warn(
            f"train.steps={steps:,}: {seen:,} of {split.rows:,} packed rows are seen; an epoch is "
            f"{counted(plan.steps_per_epoch, 'step')} of {plan.batch_rows:,}. Raise train.steps or train.batch_tokens "
            "to see them all."
        )


def answer_after(work: Work) -> None:
    """The same prompts, answered by the weights that are exported."""
    answer(work, work.weights, step=work.result.steps, moment="after")


def say_again(work: Work, restored: Restored) -> None:
    """Results and last answers of the weights that a checkpoint has given, where the record holds those of others."""
    results = work.output.record.get("results") or {} if work.output.has_reached("trained") else {}
    same = results.get("weights_step") == restored.step
    if same and any(row["moment"] == "after" for row in read_metrics(work.output.samples)):
        return
    if not same:  # until both are there, those of no weights: an export that is killed in between does both again
        work.output.update(results={**results, "weights_step": None})
    choose_samples(work)
    answer(work, work.weights, step=int(restored.latest["step"]), moment="after")
    if not same:
        known = restored_record(restored)
        of_weights = {key: known[key] for key in ("weights_step", "before", "after")}
        work.output.update(results={**known, **results, **of_weights})


def choose_samples(work: Work) -> None:
    """The prompts to answer, and the generator that answers them."""
    from podtune.serve.generate import Generator

    ask = work.run.eval
    work.prompts = choose_prompts(
        work.prepared,
        work.tokenizer,
        samples=ask.samples,
        own=ask.prompts,
        form=work.form,
        most_tokens=_most_prompt_tokens(work),
        warn=work.warn,
    )
    dtype = chosen_dtype(work.run.train.compute_dtype, platform_of(work.mesh))
    work.generator = Generator(work.model, None, work.tokenizer, compute_dtype=dtype, mesh=work.mesh)


def check_prompts(work: Work, *, offline: bool = False) -> None:
    """The form that prompts take, which is the one that is trained. Raises UserError when a prompt of the run file
    cannot be answered, before anything slow is done."""
    work.form = trained_form(work.run.data, chat=work.tokenizer.chat_template is not None, offline=offline)
    own = own_prompts(work.tokenizer, work.run.eval.prompts, form=work.form, most_tokens=_most_prompt_tokens(work))
    if own and work.tokenizer.chat_template is not None and not takes_chats(work.tokenizer, work.form):
        work.say(f"eval.prompts are continued as plain text, as this run is trained ({work.form} rows)")


def _most_prompt_tokens(work: Work) -> int:
    return work.model.config.context_length - work.run.eval.max_new_tokens


def answer(work: Work, weights: Any, *, step: int, moment: str) -> list[str]:
    """Answers the prompts with these weights and keeps the answers in samples.jsonl."""
    if not work.prompts:
        return []
    with work.timed(f"samples {moment}"):
        work.generator.weights = weights
        answers = answer_all(work.generator, work.prompts, max_new_tokens=work.run.eval.max_new_tokens)
        work.generator.weights = None
    if work.output.writes:
        record_answers(work.output.samples, work.prompts, answers, moment=moment, step=step)
    return answers


def model_record(work: Work) -> dict[str, Any]:
    from podtune.workflow.beginning import parameters, trained_parameters

    return {
        "source": work.run.model.source,
        "family": work.model.family.name,
        "fingerprint": work.files.fingerprint,
        "tokenizer_fingerprint": work.tokenizer.fingerprint,
        "parameters": parameters(work.model),
        "trained_parameters": trained_parameters(work),
    }


def data_record(work: Work) -> dict[str, Any]:
    splits = {"train": work.prepared.train, "validation": work.prepared.validation}
    return {
        "fingerprint": work.prepared.fingerprint,
        "folder": str(work.prepared.folder),
        "form": work.form,
        **{
            name: {key: getattr(split, key) for key in ("examples", "rows", "row_tokens", "tokens", "trained_tokens")}
            for name, split in splits.items()
            if split is not None
        },
    }


def results_record(work: Work) -> dict[str, Any]:
    """Losses before and after, of the weights that are kept."""
    result = work.result
    kept_best = result.weights_step != result.steps
    return {
        "steps": result.steps,
        "weights_step": result.weights_step,
        "total_steps": result.total_steps,
        "train_loss": finite(result.loss),
        "before": _scored(result.first_eval_loss),
        "after": _scored(result.best_eval_loss if kept_best else result.eval_loss),
        "skipped_steps": result.skipped,
        "peak_learning_rate": result.peak_learning_rate,
        "stopped": result.stopped,
        "seconds": round(result.seconds, 2),
        "first_step_seconds": finite(result.first_step_seconds),
    }


def restored_record(restored: Restored) -> dict[str, Any]:
    """What a checkpoint knows of a run whose training has not ended, of `results_record`."""
    weights, latest = restored.notes, restored.latest
    return {
        "steps": int(latest["step"]),
        "weights_step": restored.step,
        "total_steps": int(latest["identity"]["total_steps"]),
        "train_loss": latest["losses"]["loss"],
        "before": _scored(weights["losses"]["first_eval"]),
        "after": _scored(restored.eval_loss),
        "skipped_steps": latest["skipped"],
        "seconds": round(latest["seconds"], 2),
    }


def _scored(loss: float | None) -> dict[str, float] | None:
    loss = finite(loss)
    return None if loss is None else {"loss": loss, "perplexity": perplexity(loss)}
