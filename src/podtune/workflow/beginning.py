"""The stages before training: open the model, prepare the data, check memory, load, rehearse the export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from podtune.config.errors import UserError
from podtune.config.schema import Run
from podtune.config.wording import counted, readable_bytes
from podtune.hub.addresses import is_address, is_remote
from podtune.workflow.environment import host_memory
from podtune.workflow.output import OutputFolder
from podtune.workflow.work import Work

DEFAULT_ROW_TOKENS = 2048
# A warning above this share of the memory; what does not fit at all is refused.
_CLOSE = 0.9
_FEW_TOKENS = 200  # the mean loss of fewer moves by a tenth or more from one choice of rows to the next


def prepare_alone(run: Run, console: Console, *, report: Console) -> Work:
    """The data of a run prepared as the run will find it, and what was opened for that; fetches no weights.

    report: what the table of what became of the rows is printed on."""
    work = Work(run, console, OutputFolder(Path(run.output.path), writes=False))
    open_model(work, weights=False)
    prepare_data(work, report=report)
    return work


def open_model(work: Work, *, offline: bool = False, weights: bool = True) -> None:
    """Configuration, tokenizer and the list of weights: all that data and planning need of the model. offline: fetch
    nothing. weights: False neither fetches them nor looks at their list, which preparing data does not need."""
    from podtune.data.templates import require_readable
    from podtune.families import model_from_files
    from podtune.families.loading import plan_loading
    from podtune.hub.sources import resolve_model
    from podtune.hub.tokenizer import load_tokenizer

    settings = work.run.model
    cache = Path(settings.cache) if settings.cache else None
    work.files = resolve_model(
        settings.source, cache=cache, progress=work.say, offline=offline, amount="weights" if weights else "tokenizer"
    )
    work.model = model_from_files(work.files)
    if weights:
        plan_loading(work.model, work.files.tensors())  # what is missing or broken shows before the data is prepared
    work.tokenizer = load_tokenizer(work.files, _template(settings.chat_template))
    require_readable(work.tokenizer, settings.chat_template or f"that of {settings.source}")
    work.say(f"model: {settings.source} ({work.model.family.name}, {_count(parameters(work.model))} parameters)")


def check_small_files(work: Work) -> None:
    """Raises UserError for a configuration or tokenizer that would not load once it is exported; needs no weights."""
    from podtune.export.rehearsal import rehearse_small_files

    rehearse_small_files(
        work.model, work.tokenizer, dtype=export_dtype(work), generation_config=work.files.generation_config
    )


def prepare_data(work: Work, *, report: Console | None = None) -> None:
    """Rows into packed TFRecord shards, or those from the cache; the table of what became of the rows, on the console
    `report` where there is one apart from that for all else."""
    from podtune.data.prepare import prepare

    data = work.run.data
    work.prepared = prepare(
        data, work.tokenizer, max_length=row_tokens(work), seed=work.run.seed, progress=shown_console(work)
    )
    report = report or work.console
    if not report.quiet:
        work.prepared.report.print(report)
    if work.prepared.validation is None and data.validation != "none":
        work.warn("no rows are held out: nothing tells whether the model learns or memorises.")
    held_out = work.prepared.validation
    if held_out is not None and held_out.trained_tokens < _FEW_TOKENS:
        work.warn(
            f"only {counted(held_out.trained_tokens, 'trained token')} held out: their loss and perplexity are rough "
            "figures. Hold out more with data.validation."
        )


def choose_devices(work: Work) -> None:
    """TPU, GPU or CPU, and the mesh over them; then whether the model and what training adds can fit."""
    from podtune.parallel.devices import choose_platform
    from podtune.parallel.mesh import build_mesh
    from podtune.train.cache import enable_compile_cache
    from podtune.train.program import chosen_dtype

    chosen = choose_platform()
    enable_compile_cache()
    work.device = str(chosen)
    work.say(f"device: {chosen}")
    # Frozen weights are held as they are computed with; trained ones need float32 to keep small updates.
    is_lora = work.run.method.lora is not None
    work.held_dtype = chosen_dtype(work.run.train.compute_dtype if is_lora else "float32", chosen.platform)
    weight_bytes = work.held_dtype.itemsize * parameters(work.model)
    work.mesh = build_mesh(work.run.mesh, method=work.run.method.name, weight_bytes=weight_bytes)
    work.description = describe(work)
    _check_memory(work)


def load_model(work: Work) -> None:
    """Weights into the shards of the mesh, tensor by tensor, with fresh adapters where there are any."""
    import jax

    from podtune.families.loading import load_weights

    key = jax.random.key(work.run.seed)
    work.weights = load_weights(work.model, work.description, work.files.tensors(), work.mesh, key=key, say=work.say)
    every, trained = parameters(work.model), trained_parameters(work)
    work.say(
        f"{work.run.method.name}: training {_count(trained)} of {_count(every)} parameters "
        f"({trained / every:.2%}), held in {work.held_dtype.name}"
    )


def rehearse_export(work: Work) -> None:
    """The whole export on the untrained weights, so that nothing is left to be found out after training."""
    from podtune.export.rehearsal import rehearse

    lora, export = work.run.method.lora, work.run.export
    rehearsed = rehearse(
        work.output.path,
        work.model,
        work.weights,
        work.tokenizer,
        dtype=export_dtype(work),
        generation_config=work.files.generation_config,
        adapter=lora if work.run.exports_adapter else None,
        merged=export.merged,
        base=base_name(work)[0],
        checkpoint_bytes=checkpoint_bytes(work),
    )
    work.merged_too = export.merged or bool(rehearsed.warnings)
    for warning in (*rehearsed.warnings, *([rehearsed.lost] if rehearsed.lost else [])):
        work.warn(warning)
    work.say(f"export rehearsed: {rehearsed.tensors} tensors, {readable_bytes(rehearsed.bytes)} will be written")


def describe(work: Work) -> Any:
    """The weights as they will be held, adapters attached."""
    from podtune.weights.adapters import attach

    description = work.model.describe(dtype=work.held_dtype)
    lora = work.run.method.lora
    return description if lora is None else attach(description, lora, aliases=work.model.aliases())


def row_tokens(work: Work) -> int:
    """data.max_length, or 2048, or the model's context where that is less."""
    context, asked = work.model.config.context_length, work.run.data.max_length
    if asked is not None and asked > context:
        raise UserError(
            f"data.max_length={asked:,} is more than the model's context of {context:,} tokens. "
            f"Use at most {context:,}."
        )
    return asked or min(DEFAULT_ROW_TOKENS, context)


def export_dtype(work: Work) -> str:
    """export.dtype; auto: that of the model's checkpoint, float32 where that was stored quantised."""
    asked = work.run.export.dtype
    if asked != "auto":
        return asked
    stated = work.files.config.get("dtype") or work.files.config.get("torch_dtype")
    return stated if stated in ("float32", "bfloat16", "float16") else "float32"


def base_name(work: Work) -> tuple[str, str | None]:
    """(what an adapter's base_model_name_or_path says, its revision)."""
    from podtune.hub.sources import check_model_source

    source = work.run.model.source
    hub_id = check_model_source(source)
    if hub_id is not None:
        return hub_id
    return (source if is_remote(source) else str(Path(source).expanduser().resolve())), None


def parameters(model: Any) -> int:
    from podtune.weights.leaves import parameter_count

    return parameter_count(model.describe())


def trained_parameters(work: Work) -> int:
    from podtune.train.state import divide_weights

    trained, _ = divide_weights(work.description, work.run.method.name)
    return sum(param.size for param in trained.values())


def shown_console(work: Work) -> Any:
    """The console, or None where nothing is to be shown."""
    return None if work.console.quiet else work.console


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"model.chat_template: {path} cannot be read ({why}). Name a Jinja file.") from error


def held_bytes(work: Work) -> int:
    """What a device holds throughout training: frozen and trained weights, moments, the average where one is kept, and
    gradients. On a CPU, whose devices share one memory, what all hold together. Activations come on top."""
    import jax

    from podtune.parallel.mesh import on_cpu
    from podtune.parallel.sharding import sharding_for
    from podtune.train.state import divide_weights, state_shardings
    from podtune.weights.param import is_param

    params, frozen = divide_weights(work.description, work.run.method.name)
    state = _abstract_state(work, params)
    shardings = state_shardings(work.mesh, state, params)
    kept = [*zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)]
    kept += zip(state.trainable.values(), (shardings.trainable[name] for name in state.trainable), strict=True)  # grads
    kept += [
        (param, sharding_for(work.mesh, param.axes, param.shape)) for param in jax.tree.leaves(frozen, is_leaf=is_param)
    ]
    here = sum(math.prod(place.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf, place in kept)
    return here * (work.mesh.size if on_cpu(work.mesh) else 1)


def checkpoint_bytes(work: Work) -> int:
    """What checkpoints take on this machine's disk at most: those that are kept, the best, and one being written."""
    import jax

    from podtune.train.state import divide_weights

    if is_address(work.run.output.path):
        return 0
    params, _ = divide_weights(work.description, work.run.method.name)
    one = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(_abstract_state(work, params)))
    return one * (work.run.output.keep_checkpoints + 2)


def _abstract_state(work: Work, params: Any) -> Any:
    """The state of training as shapes."""
    from podtune.train.optimizers import make_optimizer
    from podtune.train.state import abstract_state

    train = work.run.train
    optimizer = make_optimizer(train.optimizer, params, weight_decay=train.weight_decay)
    return abstract_state(params, optimizer, averaged=train.ema is not None, window=1)


def _check_memory(work: Work) -> None:
    """What training holds against the memory there is."""
    from podtune.parallel.mesh import own_device

    stats = own_device(list(work.mesh.devices.flat)).memory_stats() or {}
    there = int(stats.get("bytes_limit", 0)) or host_memory()
    needed = held_bytes(work)
    if there and needed > there:
        raise UserError(
            f"model: {work.run.model.source} needs about {_gib(needed)} a device for weights, gradients and optimizer "
            f"({work.run.method.name}, {work.run.train.optimizer.name}), and there are {_gib(there)}. "
            "Use method: lora, a smaller model, or more devices (mesh: {fsdp: …})."
        )
    if there and needed > _CLOSE * there:
        work.warn(
            f"weights, gradients and optimizer take about {_gib(needed)} of {_gib(there)} a device; little is left to "
            "compute in."
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _count(number: int) -> str:
    """134.5M, 7.2B."""
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.4g}{suffix}"
    return str(number)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
