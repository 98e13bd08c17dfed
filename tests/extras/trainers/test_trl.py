"""trl's trainer of a model with adapters of peft: all else is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


ROW = "trl, `SFTTrainer`, with peft"


@pytest.mark.filterwarnings("ignore")
def test_supervised_fine_tuning(
    case: str, forwards: int, training_arguments: dict[str, Any], holds: Any, tmp_path: Any
) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<unk>": 0, "<pad>": 1, "</s>": 2, **{f"w{i}": i + 3 for i in range(20)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), pad_token="<pad>", eos_token="</s>"
    )
    data = Dataset.from_dict({"input_ids": [[3 + (i * j) % 20 for j in range(8)] for i in range(8)]})

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}
        config = transformers.GPT2Config(vocab_size=len(words), bos_token_id=2, eos_token_id=2, pad_token_id=1, **sizes)
        # Adapters begin as 0 by default, and the gradient of half their weights with them.
        adapters = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)

    def fit(model: torch.nn.Module) -> None:
        options = {"bf16": False, **training_arguments}
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[],
            save_strategy="no", seed=1, disable_tqdm=True, logging_strategy="no", gradient_checkpointing=False,
            **options,
        )  # fmt: skip
        trl.SFTTrainer(
            model=model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer
        ).train()

    holds(make, fit, forwards=forwards, frozen="**.base_layer", evaluated=case == "evaluation")
