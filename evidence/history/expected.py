"""What changed in the functions that changed, as read in the sources of both versions, and why a verdict is false."""

from __future__ import annotations

TIMM_9, TIMM_10 = "timm 0.6.13 → 0.9.16", "timm 0.9.16 → 1.0.31"
DIFFUSERS = "diffusers 0.27.2 → 0.35.2"
GRAPHS = "torch_geometric 2.3.1 → 2.7.0"
TRANSFORMERS = "transformers 4.57.6 → 5.23.0"

FLOOR = "StdAggregation gives 0, no longer the root of its floor 1e-5, where the variance is below the floor"
POOLED = "the pooled outputs of both towers are given after the projections, no longer before"

SHARED_TIME = "the context of the temporal blocks is repeated over pixels in another order"

EXPECTED: dict[tuple[str, str], tuple[str, str]] = {
    (GRAPHS, "PNA"): (r"convs\.\S*\.aggrs\.2\b", FLOOR),
    (GRAPHS, "SAGEConv-std"): (r"c\d\.\S*\.fused_aggr\b", f"{FLOOR}, and so does FusedAggregation"),
    (GRAPHS, "PNAConv"): (r"c\d\.\S*\.aggrs\.1\b", FLOOR),
    (GRAPHS, "MLP-graph-norm"): (
        r"\(root\): .*\bnorms\.0\b", "MLP gives its norms the batch, so that each graph is normalized alone"
    ),
    (GRAPHS, "AttentiveFP"): (r"gate_conv: own code changed", "lin2 gets what came in, not the output of lin1"),
    (GRAPHS, "DMoNPooling"): (
        r"\(root\): own code changed", "the degrees and all three losses are of each graph, no longer of the batch"
    ),
    (DIFFUSERS, "unet-spatio-temporal"): (r"down_blocks\.0\.attentions\.0: own code changed", SHARED_TIME),
    (TIMM_9, "dpn68"): (r"features\.conv5_bn_ac\.bn\.act: ELU → ReLU", "the last activation is ReLU, no longer ELU"),
    (TIMM_9, "poolformer_s12"): (
        r"(head|norm|head\.norm)( added| removed|: )", "the last norm comes after the pooling, no longer before"
    ),
    (TIMM_9, "PyramidVisionTransformerV2"): (r"\S*\.eps 1e-05 → 1e-06", "the default norm has another eps"),
    (TIMM_10, "gcvit_xxtiny"): (
        r"stages\.\S*\.blocks\.\S*\.attn: own code changed",
        "the global query of an image goes to its own windows, no longer to those of other images",
    ),
    (TRANSFORMERS, "gemma2"): (
        r"model: .*\battention_mask\b|model\.layers\.\S*\.self_attn: own code",
        "attention is eager with a softcap, no longer SDPA without; where all is masked, a mean and not zeros",
    ),
    (TRANSFORMERS, "clip"): (r"\(root\): .*\bpooler_output\b", POOLED),
    (TRANSFORMERS, "chinese_clip"): (r"\(root\): .*\bpooler_output\b", POOLED),
}  # fmt: skip
"""The lines that name what changed, by pair and model, and what that is."""

BIAS = "an output inside differs: the bias of positions, to which attention no longer adds the mask"

FALSE: dict[tuple[str, str], str] = {
    (TRANSFORMERS, "gemma"): "the embeddings alone answer otherwise: they multiply by a factor that the model applied",
    (TRANSFORMERS, "gemma3"): "the module gives the angles of sliding attention now, and gave some that no layer used",
    (TRANSFORMERS, "t5"): BIAS,
    (TRANSFORMERS, "mt5"): BIAS,
    (TRANSFORMERS, "modernbert"): "numbers inside differ in rows of padding, for which the mask is another",
    (TRANSFORMERS, "perceiver"): "an argument before the mask is gone; alone, the layer is given another mask",
}
"""Why a verdict on a function that is the same is false, by pair and model."""

FAILED_BEFORE: dict[str, str] = {
    TIMM_9: """
        Beit ConvNeXt EdgeNeXt SwinTransformer SwinTransformerV2 convnext_atto convnext_nano_ols
        edgenext_xx_small ghostnet_100 rexnet_100 selecsls42 hrnet_w18_small crossvit_tiny_240
        xcit_nano_12_p16_224_dist pvt_v2_b0 sequencer2d_s inception_v3 swin_tiny_patch4_window7_224
        vit_relpos_small_patch16_224 convit_tiny pit_ti_224 levit_128s swinv2_cr_tiny_ns_224
        swinv2_tiny_window8_256 maxvit_rmlp_pico_rw_256 coatnet_nano_rw_224
    """,
    TIMM_10: """
        Nest VOLO vgg11_bn skresnet18 nf_regnet_b0 poolformer_s12 convmixer_768_32 mobilenetv3_small_050
        ghostnet_100 repghostnet_050 lcnet_035 hardcorenas_a gernet_s dpn68 cspresnet50 hgnetv2_b0 volo_d1_224
        jx_nest_tiny
    """,
    DIFFUSERS: """
        unet-2d-skip vq
    """,
    GRAPHS: """
        GAT GAT-v2 GATConv GATv2Conv EGConv HeteroConv TopKPooling SAGPooling
    """,
    TRANSFORMERS: """
        gpt_neox mixtral gemma gemma3 qwen2_moe stablelm nemotron mamba bert bert-qa roberta xlm_roberta
        camembert distilbert albert electra mobilebert modernbert t5 mt5 bart mbart pegasus marian blenderbot
        whisper hubert audio_spectrogram vit deit beit dinov2 vit_mae yolos swin segformer siglip perceiver
        llava
    """,
}
"""Functions that are the same and failed with "output unchanged; structure differs" before a refactoring passed."""
