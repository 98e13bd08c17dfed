"""Whether the operation and the line of a change are named: 76 edits of the source of models of transformers.

    python evidence/operations          # all, and writes RESULTS.md beside this
    python evidence/operations llama    # one model

Each edit (`edits.py`) is made in the text of the file of a model, which is then run as a module. So the original and
the edited class have the same file and lines. `assert_same_behavior` compares a model of each, with the same weights.
*Right* means that the failure names the operation of the edit at the line of the edit; *other*, that it names another;
*nothing*, that it names none; *missed*, that there is no failure.
"""

from __future__ import annotations

import collections
import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from edits import EDITS, HELD_OUT, Edit

from pytest_modelprobe import ModelProbe, assert_same_behavior

RESULTS = Path(__file__).with_name("RESULTS.md")
transformers.logging.set_verbosity_error()

_TEXT = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_LLAMA = {**_TEXT, **_LAYERS, "num_key_value_heads": 2, "head_dim": 8}
_IMAGE = {"image_size": 32, "num_channels": 3}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**_TEXT, **_LAYERS}),
    "gpt2": ("GPT2", {**_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("Llama", _LLAMA),
    "t5": ("T5", {**_TEXT, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
                  "decoder_start_token_id": 0}),
    "whisper": ("Whisper", {**_TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
                            "decoder_ffn_dim": 64, "max_source_positions": 16, "max_target_positions": 16,
                            "num_mel_bins": 8, "decoder_start_token_id": 1}),
    "vit": ("ViT", {**_LAYERS, **_IMAGE, "patch_size": 8}),
    "convnext": ("ConvNext", {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2,
                              "layer_scale_init_value": 0.1}),
    "swin": ("Swin", {**_IMAGE, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "patch_size": 2,
                      "window_size": 4}),
    "resnet": ("ResNet", {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2]}),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 4, "experts_implementation": "eager"}),
    "mamba": ("Mamba", {**_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "gemma2": ("Gemma2", _LLAMA),
    "distilbert": ("DistilBert", {**_TEXT, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "opt": ("OPT", {**_TEXT, **_LAYERS, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "falcon": ("Falcon", {**_TEXT, **_LAYERS}),
    "dinov2": ("Dinov2", {**_LAYERS, **_IMAGE, "patch_size": 8}),
    "segformer": ("Segformer", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "strides": [4, 2],
                                "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "num_attention_heads": [2, 4],
                                "mlp_ratios": [2, 2]}),
    "convnextv2": ("ConvNextV2", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
    "qwen3": ("Qwen3", _LLAMA),
    "cohere": ("Cohere", _LLAMA),
    "phi": ("Phi", {**_TEXT, **_LAYERS}),
    "deberta_v2": ("DebertaV2", {**_TEXT, **_LAYERS, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
                                 "max_position_embeddings": 32}),
    "poolformer": ("PoolFormer", {"num_encoder_blocks": 2, "depths": [1, 1], "strides": [4, 2], "padding": [2, 1],
                                  "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "layer_scale_init_value": 0.1}),
    "roformer": ("RoFormer", {**_TEXT, **_LAYERS, "embedding_size": 32}),
    "bloom": ("Bloom", {**_TEXT, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}  # fmt: skip
"""Folder → the class without ``Model``, and its configuration."""


def inputs_of(name: str, probe: ModelProbe) -> dict[str, torch.Tensor]:
    """Return what a model is called with. Of text a part is padding."""
    if name in ("vit", "convnext", "swin", "resnet", "dinov2", "segformer", "convnextv2", "poolformer"):
        return {"pixel_values": probe.randn(2, 3, 32, 32)}
    ids = probe.randint(3, 100, (2, 12))
    if name == "whisper":
        return {"input_features": probe.randn(2, 8, 32), "decoder_input_ids": ids}
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    more = {"decoder_input_ids": ids} if name == "t5" else {}
    return {"input_ids": ids, "attention_mask": mask, **more}


def edited(module: ModuleType, edit: Edit) -> tuple[ModuleType, int]:
    """Return a module of the edited text, and the line of the edit."""
    text = Path(str(module.__file__)).read_text()
    at = text.index(edit.old, text.index(edit.after))
    assert edit.old.count("\n") == edit.new.count("\n")
    other = ModuleType(module.__name__)
    vars(other).update(__file__=module.__file__, __package__=module.__package__, __spec__=module.__spec__)
    new = text[:at] + edit.new + text[at + len(edit.old) :]
    exec(compile(new, str(module.__file__), "exec"), vars(other))
    return other, text.count("\n", 0, at) + 1


def answer(edit: Edit) -> tuple[str, str, str]:
    """Return the verdict on an edit, the line where it is, and the sentence on the operation."""
    name, config = MODELS[edit.model]
    module = importlib.import_module(f"transformers.models.{edit.model}.modeling_{edit.model}")
    other, line = edited(module, edit)
    configuration = getattr(transformers, f"{name}Config")(**config, attn_implementation="eager")
    with ModelProbe() as probe:
        first, second = (getattr(one, f"{name}Model") for one in (module, other))
        right = probe.build(lambda: first(configuration)).eval()
        wrong = probe.build(lambda: second(configuration)).eval()
        given = inputs_of(edit.model, probe)
        place = f"modeling_{edit.model}.py:{line}"
        try:
            assert_same_behavior(
                probe.run(wrong, kwargs=given, mode="eval"),
                probe.run(right, kwargs=given, mode="eval"),
                structure=False,
            )
        except AssertionError as error:
            said = re.search(r"^First operation that differs.*?: (.*)\.$", str(error), re.MULTILINE)
            if said is None:
                return "nothing", place, str(error).partition("\n")[0]
            return "right" if is_right(edit, place, said[1]) else "other", place, said[1]
        return "missed", place, ""


def is_right(edit: Edit, place: str, said: str) -> bool:
    """Whether a sentence begins with the operation of the edit and its line."""
    taken_away = said.endswith("missing")
    operation = re.escape(edit.operation.removeprefix("-"))
    named = re.match(rf"[\w.]*\b_*[ri]?{operation}_*(\(.*?\))? at {re.escape(place)}(,|$)", said)
    return named is not None and taken_away == edit.operation.startswith("-")


def table(edits: Iterable[Edit], title: str) -> list[str]:
    """Return the part of the page on some edits."""
    counts, rows = collections.Counter[str](), []
    for edit in edits:
        verdict, place, said = answer(edit)
        counts[verdict] += 1
        cells = (verdict, place, f"{edit.old} → {edit.new}", edit.operation, said)
        row = " | ".join(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in cells)
        rows.append(f"| {row} |")
        print(rows[-1], flush=True)
    total = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
    head = ["| verdict | line of the edit | edit | operation | what is said |", "|---|---|---|---|---|"]
    return [f"## {title}", "", f"{len(rows)} edits: {total}.", "", *head, *rows, ""]


def main(only: list[str]) -> None:
    page = ["# Operations", "", f"torch {torch.__version__}, transformers {transformers.__version__}.", ""]
    for title, edits in (("Edits", EDITS), ("Held out", HELD_OUT)):
        page += table([edit for edit in edits if not only or edit.model in only], title)
    if not only:
        RESULTS.write_text("\n".join(page), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
