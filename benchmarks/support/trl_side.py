"""The other side of `sft_packed.py`: TRL's SFTTrainer with packing, its own loop stopped before each step for its turn.

Best fit packing flattens a batch into one sequence and keeps chats apart by their positions; `wrapped` cuts one long
stream into rows, so that chats see each other and are cut in two: not the same training, but its fastest.
Gradient checkpointing, which SFTConfig switches on, is off; the loss is TRL's own, in chunks.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from support.pairs import Turns
from support.sft_inputs import ALPHA, LEARNING_RATE, RANK


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(arguments["threads"])
    bfloat16 = arguments["precision"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(
        arguments["folder"], dtype=torch.bfloat16 if bfloat16 else torch.float32, attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments["tokenizer"])
    useful = 0

    class TakeTurns(TrainerCallback):
        turns: Turns | None = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.turns is None:
                self.turns = Turns({"torch": torch.__version__})
            if not self.turns.wait():
                # Within the trainer's loop there is no way out that does not first do the step.
                sys.stdout.flush()
                os._exit(0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert self.turns is not None
            self.turns.done({"tokens": useful})

    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=arguments["chats"], split="train"),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear"),
        callbacks=[TakeTurns()],
        args=SFTConfig(
            output_dir=arguments["scratch"],
            packing=True,
            packing_strategy=arguments["packing"],
            max_length=arguments["row_tokens"],
            per_device_train_batch_size=arguments["rows"],
            gradient_checkpointing=False,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            max_steps=1_000_000,
            bf16=bfloat16,
            use_cpu=True,
            logging_steps=1_000_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    collate = trainer.data_collator

    def counted(examples: list[Any]) -> Any:
        nonlocal useful
        batch = collate(examples)
        useful = sum(len(example["input_ids"]) for example in examples)
        return batch

    trainer.data_collator = counted
    trainer.train()


if __name__ == "__main__":
    main()
