"""Fifty public classes, made small with random weights, and inputs that they take.

They were chosen before the first run, by this rule:

- sixteen packages; `evidence/history` has snapshots of two of the classes, `PriorTransformer` and `LINKX`;
- of each the classes that the modules of `NAMESPACES` give, sorted by name and shuffled by ``random.Random(2026)``;
- passed over: abstract classes; classes without a child or without a trainable parameter; those that are not made of
  numbers, strings, flags, and lists, dicts or the package's own configurations and norms; those that cannot be made
  with less than 10 million parameters; those that take sparse tensors, or need a GPU, a compiled extension or a
  download;
- the first three of each package, and the fourth of the first two packages. `PASSED_OVER` has those before them.

None was exchanged after the first run.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

torch.version.cuda = None  # torchaudio and torchvision refuse a torch for another CUDA; nothing here uses one

NAMESPACES = {
    "braindecode": "braindecode.models",
    "compressai": "compressai.models",
    "deepctr-torch": "deepctr_torch.models",
    "diffusers": "diffusers.models",
    "fair-esm": "esm",
    "lightly": "lightly.models.modules.heads",
    "mambapy": "mambapy.mamba, .vim, .jamba",
    "nflows": "nflows.nn.nets, nflows.transforms",
    "normflows": "normflows.nets, normflows.flows",
    "pyro-ppl": "pyro.nn",
    "snntorch": "snntorch",
    "spandrel": "spandrel.architectures.*: the class with the name of its folder",
    "speechbrain": "speechbrain.lobes.models.*: classes that a file defines",
    "tabm": "tabm, rtdl_num_embeddings",
    "torch-geometric": "torch_geometric.nn.models",
    "ultralytics": "ultralytics.nn.modules",
}

PASSED_OVER = {
    "abstract or a container": (
        "compressai.models:CompressionModel", "nflows.transforms:Transform", "pyro.nn:PyroModule",
        "pyro.nn:PyroModuleList", "nflows.transforms:MultiscaleCompositeTransform", "snntorch:LIF",
    ),
    "no child, or no trainable parameter": (
        "mambapy.mamba:RMSNorm", "nflows.transforms:NaiveLinear", "nflows.transforms:IdentityTransform",
        "nflows.transforms:Permutation", "snntorch:Alpha", "snntorch:DeltaLeaky", "snntorch:StateLeaky",
        "rtdl_num_embeddings:LinearEmbeddings", "torch_geometric.nn.models:LabelPropagation",
        "torch_geometric.nn.models:CorrectAndSmooth", "nflows.transforms:Tanh", "nflows.transforms:LogTanh",
        "normflows.flows:PeriodicShift", "normflows.flows:Permute",
        "speechbrain.lobes.models.HifiGAN:MultiScaleSTFTLoss",
    ),
    "not made of numbers and strings": (
        "nflows.transforms:PiecewiseCubicCouplingTransform", "nflows.transforms:AdditiveCouplingTransform",
        "nflows.transforms:AffineCouplingTransform", "torch_geometric.nn.models:MetaLayer", "pyro.nn:MaskedLinear",
    ),
    "10 million parameters or more": ("speechbrain.lobes.models.segan_model:Generator",),
    "takes sparse tensors": ("torch_geometric.nn.models:LPFormer",),
    "needs a compiled extension": ("torch_geometric.nn.models:ViSNet",),
    "needs a GPU": ("compressai.models:DensityPreservingReconstructionPccModel",),
}  # fmt: skip


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _i(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape)


def _channels(number: int) -> list[dict[str, Any]]:
    """Return channels with the places of their sensors, as braindecode takes them."""
    places = torch.rand(number, 3, generator=torch.Generator().manual_seed(0)).double().numpy()
    return [{"ch_name": f"C{at}", "loc": places[at]} for at in range(number)]


def _columns() -> list[Any]:
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    sparse = [SparseFeat(f"s{at}", vocabulary_size=20, embedding_dim=8) for at in range(3)]
    return [*sparse, DenseFeat("d", 4)]


def _clicks() -> tuple[torch.Tensor]:
    return (torch.cat([_i(20, 8, 3).float(), _r(8, 4)], 1),)


def _protein(**more: Any) -> tuple[Any, Any]:
    from esm.data import Alphabet

    sizes = {"embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 2, "layers": 2, "max_positions": 64, **more}
    arch = more["arch"]
    names = {"roberta_large": "ESM-1b", "msa_transformer": "msa_transformer"}
    return argparse.Namespace(**sizes), Alphabet.from_architecture(names[arch])


def _jamba() -> Any:
    from mambapy.jamba import JambaLMConfig

    return JambaLMConfig(
        d_model=32, n_layers=2, mlp_size=64, d_state=8, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        attn_layer_offset=1, attn_layer_period=2, vocab_size=50,
    )  # fmt: skip


def _norm() -> type[nn.Module]:
    from speechbrain.nnet.normalization import LayerNorm

    return LayerNorm


def _mamba() -> Any:
    from mambapy.mamba import MambaConfig

    return MambaConfig(d_model=32, n_layers=2, d_state=8)


EEG = {"n_chans": 4, "n_outputs": 3, "sfreq": 100}
TABM = {"n_blocks": 2, "d_block": 32, "dropout": 0.1}
SPLINE = {"features": 6, "hidden_features": 32, "num_bins": 5}
MSA = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "max_tokens": 4096}

# fmt: off
MODELS: dict[str, tuple[Callable[[Any], nn.Module], Callable[[], tuple[Any, ...] | dict[str, Any]]]] = {
    "braindecode.models:SensingDynamics": (
        lambda c: c(n_outputs=3, n_chans=16, n_times=2000, sfreq=2000, temporal_channels=32, mid_channels=8,
                    spatial_channels=8, mlp_hidden=32),
        lambda: (_r(4, 16, 2000),)),
    "braindecode.models:SignalJEPA_Contextual": (
        lambda c: c(n_outputs=3, chs_info=_channels(4), n_times=256, sfreq=128, transformer__num_encoder_layers=2,
                    transformer__num_decoder_layers=2),
        lambda: (_r(4, 4, 256),)),
    "braindecode.models:SleepStagerBlanco2020": (
        lambda c: c(**EEG, input_window_seconds=10), lambda: (_r(4, 4, 1000),)),
    "braindecode.models:CTNet": (
        lambda c: c(**EEG, n_times=500, num_layers=2, kernel_size=16), lambda: (_r(4, 4, 500),)),
    "compressai.models:FactorizedPriorReLU": (lambda c: c(8, 12), lambda: (torch.rand(2, 3, 64, 64),)),
    "compressai.models:Elic2022Chandelier": (
        lambda c: c(N=16, M=32, groups=[4, 4, 8, 16]), lambda: (torch.rand(2, 3, 64, 64),)),
    "compressai.models:ScaleHyperpriorVbr": (lambda c: c(8, 12), lambda: (torch.rand(2, 3, 64, 64),)),
    "compressai.models:ResidualBlockWithStride": (lambda c: c(4, 8), lambda: (_r(2, 4, 16, 16),)),
    "deepctr_torch.models:AutoInt": (
        lambda c: c(_columns(), _columns(), dnn_hidden_units=(32, 16)), _clicks),
    "deepctr_torch.models:MMOE": (
        lambda c: c(_columns(), expert_dnn_hidden_units=(32, 16), gate_dnn_hidden_units=(16,),
                    tower_dnn_hidden_units=(16,)), _clicks),
    "deepctr_torch.models:AFN": (
        lambda c: c(_columns(), _columns(), ltl_hidden_size=16, afn_dnn_hidden_units=(32, 16)), _clicks),
    "diffusers.models:DreamLiteUNetModel": (
        lambda c: c(block_out_channels=(32, 32, 32), layers_per_block=1, cross_attention_dim=16, norm_num_groups=8,
                    attention_head_dim=2),
        lambda: {"sample": _r(2, 4, 16, 16), "timestep": _i(1000, 2), "encoder_hidden_states": _r(2, 6, 16)}),
    "diffusers.models:PriorTransformer": (
        lambda c: c(num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=7),
        lambda: {"hidden_states": _r(2, 16), "timestep": _i(1000, 2), "proj_embedding": _r(2, 16),
                 "encoder_hidden_states": _r(2, 7, 16)}),
    "diffusers.models:QwenImageControlNetModel": (
        lambda c: c(in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
                    joint_attention_dim=16, axes_dims_rope=(8, 4, 4)),
        lambda: {"hidden_states": _r(2, 16, 16), "controlnet_cond": _r(2, 16, 16),
                 "encoder_hidden_states": _r(2, 5, 16), "timestep": torch.rand(2),
                 "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.long),
                 "img_shapes": [(1, 4, 4)] * 2}),
    "esm:ProteinBertModel": (
        lambda c: c(*_protein(arch="roberta_large", emb_layer_norm_before=True, token_dropout=True)),
        lambda: (_i(24, 3, 20, low=4),)),
    "esm:MSATransformer": (
        lambda c: c(*_protein(arch="msa_transformer", embed_positions_msa=True, **MSA)),
        lambda: (_i(24, 2, 3, 20, low=4),)),
    "esm:ESM2": (lambda c: c(num_layers=2, embed_dim=32, attention_heads=4), lambda: (_i(24, 3, 20, low=4),)),
    "lightly.models.modules.heads:NNCLRPredictionHead": (lambda c: c(16, 32, 8), lambda: (_r(8, 16),)),
    "lightly.models.modules.heads:LeWMProjectionHead": (lambda c: c(16, 32, 8), lambda: (_r(8, 16),)),
    "lightly.models.modules.heads:DenseCLProjectionHead": (lambda c: c(16, 32, 8), lambda: (_r(8, 16),)),
    "mambapy.jamba:AttentionLayer": (lambda c: c(_jamba(), 4), lambda: (_r(4, 10, 32),)),
    "mambapy.jamba:Jamba": (lambda c: c(_jamba()), lambda: (_r(4, 10, 32),)),
    "mambapy.mamba:ResidualBlock": (lambda c: c(_mamba()), lambda: (_r(4, 10, 32),)),
    "nflows.transforms:MaskedPiecewiseRationalQuadraticAutoregressiveTransform": (
        lambda c: c(**SPLINE, tails="linear", tail_bound=3.0), lambda: (_r(8, 6),)),
    "nflows.nn.nets:MLP": (lambda c: c((6,), (4,), [16, 16]), lambda: (_r(8, 6),)),
    "nflows.transforms:MaskedPiecewiseQuadraticAutoregressiveTransform": (
        lambda c: c(**SPLINE, tails="linear", tail_bound=3.0), lambda: (_r(8, 6),)),
    "normflows.flows:LULinearPermute": (lambda c: c(6), lambda: (_r(8, 6),)),
    "normflows.nets:MLP": (lambda c: c([6, 32, 32, 4]), lambda: (_r(8, 6),)),
    "normflows.nets:LipschitzMLP": (lambda c: c([6, 32, 4]), lambda: (_r(8, 6),)),
    "pyro.nn:ConditionalAutoRegressiveNN": (lambda c: c(6, 3, [32, 32]), lambda: (_r(8, 6), _r(8, 3))),
    "pyro.nn:DenseNN": (lambda c: c(6, [32, 32]), lambda: (_r(8, 6),)),
    "pyro.nn:ConditionalDenseNN": (lambda c: c(6, 3, [32, 32]), lambda: (_r(8, 6), _r(8, 3))),
    "snntorch:SConv2dLSTM": (lambda c: c(2, 4, 3), lambda: (_r(4, 2, 8, 8),)),
    "snntorch:RLeaky": (lambda c: c(0.9, linear_features=8), lambda: (_r(4, 8),)),
    "snntorch:LeakyParallel": (lambda c: c(6, 8), lambda: (_r(10, 4, 6),)),
    "spandrel.architectures.NAFNet:NAFNet": (
        lambda c: c(width=8, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1]), lambda: (torch.rand(2, 3, 16, 16),)),
    "spandrel.architectures.MoESR:MoESR": (
        lambda c: c(dim=16, n_blocks=2, n_block=2, upsample_dim=16, scale=2), lambda: (torch.rand(2, 3, 16, 16),)),
    "spandrel.architectures.Uformer:Uformer": (
        lambda c: c(img_size=64, embed_dim=8, depths=[1] * 9, num_heads=[1] * 9, win_size=4),
        lambda: (torch.rand(2, 3, 64, 64),)),
    "speechbrain.lobes.models.convolution:ConvBlock": (
        lambda c: c(2, 8, (4, 20, 16), residual=True, norm=_norm()), lambda: (_r(4, 20, 16),)),
    "speechbrain.lobes.models.dual_path:SepformerWrapper": (
        lambda c: c(encoder_out_nchannels=16, masknet_chunksize=10, intra_numlayers=1, inter_numlayers=1,
                    intra_nhead=2, inter_nhead=2, intra_dffn=32, inter_dffn=32),
        lambda: (_r(2, 400),)),
    "speechbrain.lobes.models.conv_tasnet:Encoder": (lambda c: c(16, 12), lambda: (_r(2, 400),)),
    "tabm:MLPBackbone": (lambda c: c(d_in=6, **TABM), lambda: (_r(8, 6),)),
    "rtdl_num_embeddings:PeriodicEmbeddings": (lambda c: c(6, 8, lite=False), lambda: (_r(8, 6),)),
    "tabm:MLPBackboneBatchEnsemble": (
        lambda c: c(d_in=6, k=4, tabm_init=True, scaling_init="random-signs", start_scaling_init_chunks=None, **TABM),
        lambda: (_r(8, 4, 6),)),
    "torch_geometric.nn.models:LINKX": (lambda c: c(12, 6, 16, 3, 2), lambda: (_r(12, 6), _i(12, 2, 40))),
    "torch_geometric.nn.models:GIN": (lambda c: c(6, 16, 2, 3), lambda: (_r(12, 6), _i(12, 2, 40))),
    "torch_geometric.nn.models:MLP": (lambda c: c([6, 16, 3]), lambda: (_r(12, 6),)),
    "ultralytics.nn.modules:Proto": (lambda c: c(8, 16, 4), lambda: (_r(2, 8, 16, 16),)),
    "ultralytics.nn.modules:Bottleneck": (lambda c: c(8, 8), lambda: (_r(2, 8, 16, 16),)),
    "ultralytics.nn.modules:RepC3": (lambda c: c(8, 16), lambda: (_r(2, 8, 16, 16),)),
}
# fmt: on


def make(name: str) -> nn.Module:
    """Return a model of the class of that name."""
    module, _, attribute = name.partition(":")
    return MODELS[name][0](getattr(importlib.import_module(module), attribute))


def inputs(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments, the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(2026)
        given = MODELS[name][1]()
    return ((), given) if isinstance(given, dict) else (given, {})
