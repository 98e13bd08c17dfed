"""Changes of one operation in a layer of models of transformers, written before the first run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the source of a model. It keeps the number of lines."""

    model: str
    after: str
    """What stands above in the file, from which on `old` is searched."""
    old: str
    """The first line of it is where the operation is called."""
    new: str
    operation: str
    """What ends the name of the operation that is to be named; with a minus, it is one that the edit takes away."""


EDITS = (
    # --- BERT
    Edit("bert", "def eager_", "softmax(attn_weights, dim=-1)", "softmax(attn_weights, dim=-2)", "softmax"),
    Edit("bert", "def eager_", "key.transpose(2, 3)) * scaling", "key.transpose(2, 3)) / scaling", "div"),
    Edit("bert", "def eager_", "attn_output.transpose(1, 2).contiguous()", "attn_output.contiguous()", "-transpose"),
    Edit("bert", "class BertEmb", "embeddings = embeddings + position_embeddings", "embeddings = embeddings", "-add"),
    Edit("bert", "class BertPooler", "hidden_states[:, 0]", "hidden_states[:, -1]", "getitem"),
    Edit("bert", "def eager_", "attn_weights + attention_mask", "attn_weights - attention_mask", "sub"),
    # --- GPT-2
    Edit("gpt2", "def eager_", "softmax(attn_weights, dim=-1)", "softmax(attn_weights * 0.5, dim=-1)", "mul"),
    Edit(
        "gpt2",
        "        else:\n            query_states",
        "query_states, key_states, value_states = self.c_attn",
        "key_states, query_states, value_states = self.c_attn",
        "split",
    ),
    Edit("gpt2", "class GPT2Block", "attn_output + residual", "attn_output - residual", "sub"),
    Edit("gpt2", "class GPT2MLP", "self.act(hidden_states)", "self.act(hidden_states) * 1.1", "mul"),
    Edit(
        "gpt2",
        "def eager_",
        "matmul(attn_weights, value)",
        "matmul(attn_weights.transpose(-1, -2), value)",
        "transpose",
    ),
    # --- Llama
    Edit("llama", "def rotate_half", "torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)", "neg"),
    Edit("llama", "def apply_rotary", "(q * cos) + (rotate", "(q * cos) - (rotate", "sub"),
    Edit(
        "llama", "class LlamaRMSNorm", "torch.rsqrt(variance + self.variance_epsilon)", "torch.rsqrt(variance)", "-add"
    ),
    Edit("llama", "class LlamaRMSNorm", "hidden_states.pow(2).mean", "hidden_states.abs().mean", "abs"),
    Edit("llama", "def eager_", "softmax(attn_weights, dim=-1", "softmax(attn_weights, dim=1", "softmax"),
    Edit(
        "llama",
        "class LlamaMLP",
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.act_fn(self.up_proj(x)) * self.gate_proj(x)",
        "mul",
    ),
    Edit(
        "llama",
        "def repeat_kv",
        "hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)",
        "hidden_states[:, None, :, :, :].expand(batch, n_rep, num_key_value_heads, slen, head_dim)",
        "getitem",
    ),
    Edit(
        "llama",
        "class LlamaRotary",
        "torch.cat((freqs, freqs), dim=-1)",
        "torch.repeat_interleave(freqs, 2, dim=-1)",
        "repeat_interleave",
    ),
    Edit(
        "llama",
        "hidden_states = self.mlp(hidden_states)",
        "residual + hidden_states",
        "residual + 0.5 * hidden_states",
        "mul",
    ),
    # --- T5
    Edit("t5", "class T5LayerNorm", "torch.rsqrt(variance", "torch.sqrt(variance", "sqrt"),
    Edit("t5", "def _relative_position_bucket", "(relative_position > 0)", "(relative_position >= 0)", "ge"),
    Edit("t5", "def compute_bias", "permute([2, 0, 1])", "permute([2, 1, 0])", "permute"),
    Edit("t5", "class T5LayerFF", "hidden_states + self.dropout", "forwarded_states + self.dropout", "add"),
    Edit("t5", "def eager_", "attn_weights = attn_weights + position_bias", "attn_weights = attn_weights", "-add"),
    Edit(
        "t5",
        "def compute_bias",
        "memory_position - context_position",
        "context_position - memory_position",
        "sub",
    ),
    # --- Whisper
    Edit("whisper", "class WhisperEncoder(", "gelu(self.conv1(", "relu(self.conv1(", "relu"),
    Edit(
        "whisper",
        "class WhisperAttention",
        "(self.q_proj(hidden_states) * self.scaling)",
        "(self.q_proj(hidden_states))",
        "-mul",
    ),
    Edit(
        "whisper",
        "class WhisperPos",
        "past_key_values_length : past_key_values_length + input_ids.shape[1]",
        "1 + past_key_values_length : 1 + past_key_values_length + input_ids.shape[1]",
        "getitem",
    ),
    # --- ViT
    Edit(
        "vit",
        "class ViTEmbeddings",
        "torch.cat((cls_tokens, embeddings), dim=1)",
        "torch.cat((embeddings, cls_tokens), dim=1)",
        "cat",
    ),
    Edit(
        "vit",
        "class ViTPatch",
        ".flatten(2).transpose(1, 2)",
        ".transpose(2, 3).flatten(2).transpose(1, 2)",
        "transpose",
    ),
    Edit("vit", "class ViTLayer", "hidden_states = hidden_states + residual", "hidden_states = hidden_states", "-add"),
    Edit("vit", "def eager_", "key.transpose(2, 3)) * scaling", "key.transpose(2, 3)) * scaling * scaling", "mul"),
    # --- ConvNeXt
    Edit(
        "convnext",
        "class ConvNextLayer(",
        "self.layer_scale_parameter * features",
        "self.layer_scale_parameter + features",
        "add",
    ),
    Edit("convnext", "class ConvNextLayer(", "features.permute(0, 3, 1, 2)", "features.permute(0, 3, 2, 1)", "permute"),
    Edit("convnext", "class ConvNextLayer(", "residual + self.drop_path", "residual - self.drop_path", "sub"),
    # --- Swin
    Edit(
        "swin",
        "def window_partition",
        "input_feature.transpose(2, 3).contiguous()",
        "input_feature.contiguous()",
        "-transpose",
    ),
    Edit(
        "swin",
        "def cyclic_shift",
        "torch.roll(\n                hidden_states,\n                shifts=(direction * self.shift_size, "
        "direction * self.shift_size)",
        f"torch.roll(\n{' ' * 16}hidden_states,\n{' ' * 16}shifts=(direction * self.shift_size, 0)",
        "roll",
    ),
    Edit(
        "swin",
        "class SwinPatchMerging",
        "torch.cat(\n            [input_feature[:, row::2, col::2, :] for col in range(2) for row in range(2)]",
        "torch.cat(\n            [input_feature[:, row::2, col::2, :] for row in range(2) for col in range(2)]",
        "cat",
    ),
    Edit("swin", "def get_attn_mask", "attn_mask != 0, -100.0", "attn_mask != 0, -1.0", "masked_fill"),
    # --- ResNet
    Edit("resnet", "class ResNetBottleNeckLayer", "hidden_state += residual", "hidden_state -= residual", "sub"),
    # --- Mixtral
    Edit(
        "mixtral", "class MixtralTopK", "router_top_value /= router_top_value.sum(dim=-1, keepdim=True)", "pass", "-sum"
    ),
    Edit(
        "mixtral",
        "class MixtralExperts",
        "current_hidden_states * top_k_weights[token_idx, top_k_pos, None]",
        "current_hidden_states",
        "-getitem",
    ),
    # --- Mamba
    Edit(
        "mamba", "class MambaMixer", "A = -torch.exp(self.A_log.float())", "A = torch.exp(self.A_log.float())", "-neg"
    ),
    Edit("mamba", "def mamba_selective_scan", "dt = F.softplus(dt)", "dt = F.relu(dt)", "relu"),
    Edit(
        "mamba",
        "def mamba_selective_scan",
        "scan_output = scan_output + hidden_states * D[None, :, None]",
        "scan_output = scan_output",
        "-getitem",
    ),
    # --- Gemma 2
    Edit("gemma2", "def eager_", "torch.tanh(attn_weights)", "torch.sin(attn_weights)", "sin"),
    Edit("gemma2", "class Gemma2RMSNorm", "(1.0 + self.weight.float())", "(self.weight.float())", "-add"),
    # --- BLOOM
    Edit("bloom", "def bloom_gelu_forward", "(1 + 0.044715 * x * x)", "(1 + 0.04715 * x * x)", "mul"),
    Edit(
        "bloom",
        "class BloomAttention",
        "alibi.baddbmm(\n            batch1=query_layer,\n            batch2=key_layer,\n            beta=self.beta",
        "alibi.baddbmm(\n            batch1=query_layer,\n            batch2=key_layer,\n            beta=0.5",
        "baddbmm",
    ),
)

HELD_OUT = (
    # --- DistilBERT
    Edit("distilbert", "def eager_", "softmax(attn_weights, dim=-1)", "softmax(attn_weights, dim=0)", "softmax"),
    Edit("distilbert", "def eager_", "matmul(attn_weights, value)", "matmul(attn_weights.square(), value)", "square"),
    # --- OPT
    Edit(
        "opt", "class OPTAtt", "q_proj(hidden_states) * self.scaling", "q_proj(hidden_states) * self.scaling**2", "mul"
    ),
    Edit("opt", "class OPTLearned", "forward(position_ids + self.offset)", "forward(position_ids + 1)", "add"),
    Edit("opt", "class OPTDecoderLayer", "residual + hidden_states", "residual * hidden_states", "mul"),
    # --- Falcon
    Edit("falcon", "def rotate_half", "torch.cat((-x2, x1), dim=-1)", "torch.cat((x1, -x2), dim=-1)", "cat"),
    Edit("falcon", "def dropout_add", "out = residual + out", "out = residual - out", "sub"),
    # --- DINOv2
    Edit("dinov2", "class Dinov2LayerScale", "* self.lambda1", "* self.lambda1.abs().sqrt()", "abs"),
    Edit(
        "dinov2", "class Dinov2Patch", ".flatten(2).transpose(1, 2)", ".flatten(2).roll(1, -1).transpose(1, 2)", "roll"
    ),
    # --- SegFormer
    Edit(
        "segformer",
        "class SegformerDepthWiseConv",
        "hidden_states.transpose(1, 2).view(batch_size, num_channels, height, width)",
        "hidden_states.transpose(1, 2).reshape(batch_size, num_channels, width, height).transpose(2, 3)",
        "transpose",
    ),
    Edit(
        "segformer",
        "self.sequence_reduction = nn.Conv2d",
        "hidden_states.transpose(1, 2).reshape(batch_size, num_channels, height, width)",
        "hidden_states.reshape(batch_size, num_channels, height, width)",
        "-transpose",
    ),
    # --- ConvNeXt V2
    Edit("convnextv2", "class ConvNextV2GRN", "ord=2", "ord=1", "vector_norm"),
    Edit("convnextv2", "class ConvNextV2GRN", "mean(dim=-1, keepdim=True)", "mean(dim=1, keepdim=True)", "mean"),
    # --- Qwen3
    Edit("qwen3", "class Qwen3RMSNorm", "mean(-1, keepdim=True)", "mean(-2, keepdim=True)", "mean"),
    Edit("qwen3", "def apply_rotary", "(rotate_half(k) * sin)", "(rotate_half(k) * cos)", "mul"),
    # --- Cohere
    Edit(
        "cohere", "def rotate_half", "torch.stack([-x2, x1], dim=-1).flatten(-2)", "torch.cat([-x2, x1], dim=-1)", "cat"
    ),
    Edit(
        "cohere",
        "class CohereDecoderLayer",
        "hidden_states_attention + hidden_states_mlp",
        "hidden_states_attention",
        "-add",
    ),
    Edit("cohere", "class CohereLayerNorm", "(hidden_states - mean).pow(2)", "hidden_states.pow(2)", "pow"),
    # --- Phi
    Edit("phi", "class PhiAttention", "torch.cat((query_rot, query_pass)", "torch.cat((query_pass, query_rot)", "cat"),
    Edit("phi", "class PhiDecoderLayer", "feed_forward_hidden_states + residual", "feed_forward_hidden_states", "-add"),
    # --- DeBERTa V2
    Edit(
        "deberta_v2",
        "class DisentangledSelf",
        "scale.to(dtype=query_layer.dtype)",
        "scale.to(dtype=query_layer.dtype).square()",
        "square",
    ),
    Edit(
        "deberta_v2",
        "class DisentangledSelf",
        "masked_fill(~(attention_mask)",
        "masked_fill((attention_mask)",
        "-invert",
    ),
    # --- PoolFormer
    Edit(
        "poolformer",
        "class PoolFormerPooling",
        "self.pool(hidden_states) - hidden",
        "self.pool(hidden_states) + hidden",
        "add",
    ),
    Edit(
        "poolformer",
        "class PoolFormerLayer",
        "hidden_states + self.drop_path(scaled_op)",
        "scaled_op + self.drop_path(scaled_op)",
        "add",
    ),
    # --- RoFormer
    Edit("roformer", "def apply_rotary", "torch.stack([sin, sin], dim=-1)", "torch.cat([sin, sin], dim=-1)", "cat"),
    Edit(
        "roformer",
        "class RoFormerSelfAttention",
        "softmax(attention_scores, dim=-1)",
        "softmax(attention_scores.tanh(), dim=-1)",
        "tanh",
    ),
)
"""Edits of other models, written when the code was done and before the first run of them."""
