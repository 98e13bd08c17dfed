"""`transformers.Trainer`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

ROW = "transformers, `Trainer`"


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, 50, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones(10, dtype=torch.long), "labels": index % 3}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer(case: str, forwards: int, training_arguments: dict[str, Any], holds: Any, tmp_path: Any) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(5)
        sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        # Larger weights than BERT's: else attention is nearly uniform, and gives queries and keys almost no gradient.
        config = transformers.BertConfig(**sizes, intermediate_size=64, num_labels=3, initializer_range=0.3)
        model = transformers.BertForSequenceClassification(config)
        model.bert.embeddings.requires_grad_(False)
        for layer in model.bert.encoder.layer:
            layer.attention.self.key.bias.requires_grad_(False)  # its gradient is rounding error
        return model

    def fit(model: torch.nn.Module) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            save_strategy="no", seed=1, learning_rate=1e-4, disable_tqdm=True, logging_strategy="no",
            **training_arguments,
        )  # fmt: skip
        data = Tokens()
        transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data).train()

    holds(make, fit, forwards=forwards, frozen="bert.embeddings.**", evaluated=case == "evaluation")
