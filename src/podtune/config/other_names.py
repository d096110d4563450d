"""What other tools call podtune's settings, for the message about a key that does not exist."""

from collections.abc import Mapping

OTHER_NAMES: Mapping[str, str] = {
    "lr": "train.learning_rate",
    "r": "method.lora.rank",
    "lora_r": "method.lora.rank",
    "lora_rank": "method.lora.rank",
    "lora_alpha": "method.lora.alpha",
    "lora_dropout": "method.lora.dropout",
    "lora_target_modules": "method.lora.targets",
    "target_modules": "method.lora.targets",
    "use_rslora": "method.lora.rslora",
    "batch_size": "train.batch_tokens",
    "micro_batch_size": "train.batch_tokens",
    "per_device_train_batch_size": "train.batch_tokens",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_checkpointing": "train.remat",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "sequence_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "warmup": "train.schedule.warmup",
    "warmup_ratio": "train.schedule.warmup",
    "warmup_steps": "train.schedule.warmup",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.clip_norm",
    "optim": "train.optimizer",
    "label_smoothing_factor": "train.label_smoothing",
    "neftune_noise_alpha": "train.neftune",
    "logging_steps": "train.log_every",
    "save_steps": "train.checkpoint_every",
    "eval_steps": "eval.every",
    "val_set_size": "data.validation",
    "sample_packing": "data.packing",
    "bf16": "train.compute_dtype",
    "base_model": "model",
    "model_name_or_path": "model",
    "dataset": "data",
    "datasets": "data",
    "output_dir": "output",
}
"""As Hugging Face's Trainer, TRL, PEFT, axolotl and LLaMA-Factory call it -> the key in full."""

COUNTED_OTHERWISE: Mapping[str, str] = {
    "train.batch_tokens": "in tokens, not rows",
    "train.checkpoint_every": "a time, such as 10m",
}
"""Where the number is of something else."""


def called_here(name: str) -> str | None:
    """The key for a setting under another tool's name, and what it is counted in where that is another thing."""
    key = OTHER_NAMES.get(name.lower().replace("-", "_"))
    if key is None:
        return None
    return f"{key} ({COUNTED_OTHERWISE[key]})" if key in COUNTED_OTHERWISE else key
