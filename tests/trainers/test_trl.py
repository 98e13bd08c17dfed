"""trl's trainer of a model with adapters of peft: all else is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.mark.filterwarnings("ignore")
def test_supervised_fine_tuning(modelprobe: Any, tmp_path: Any) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from pytest_modelprobe import assert_frozen, assert_grad_finite

    words = {"<unk>": 0, "<pad>": 1, "</s>": 2, **{f"w{i}": i + 3 for i in range(20)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), pad_token="<pad>", eos_token="</s>"
    )
    data = Dataset.from_dict({"input_ids": [[3 + (i * j) % 20 for j in range(8)] for i in range(8)]})

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}
        config = transformers.GPT2Config(vocab_size=len(words), bos_token_id=2, eos_token_id=2, pad_token_id=1, **sizes)
        return peft.get_peft_model(transformers.GPT2LMHeadModel(config), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))

    def fit(model: torch.nn.Module) -> None:
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            bf16=False, save_strategy="no", seed=1, disable_tqdm=True, logging_strategy="no",
            gradient_checkpointing=False,
        )  # fmt: skip
        trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()

    unwatched, model = make(), make()
    fit(unwatched)
    watch = modelprobe.watch(model, steps=2)
    fit(model)
    assert [(step.forwards, step.backwards) for step in watch.steps] == [(1, 1)] * 2
    assert_grad_finite(watch)
    assert_frozen(watch, layers="**.base_layer")
    for name, tensor in unwatched.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
