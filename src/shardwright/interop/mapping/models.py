"""Mappings of well-known models, as texts for `Mapping`. The left side has the names of a Hugging Face checkpoint.

`SHIPPED` has them all by name.
"""

from __future__ import annotations

__all__ = ["LLAMA", "LLAMA_MEGATRON", "MIXTRAL", "QWEN3_MOE", "SHIPPED"]

LLAMA = """\
# Llama: Hugging Face = Meta's original checkpoints, torchtitan. Pass r=, half the size of a head.
# The two halves of a head that rotary embeddings rotate are interleaved on the right.
model.embed_tokens.weight = tok_embeddings.weight
model.layers.{i}.self_attn.{q,k}_proj.weight = layers.{i}.attention.{wq,wk}.weight :
    (a 2 r) e, (b 2 r) e = (a r 2) e, (b r 2) e
model.layers.{i}.self_attn.{v,o}_proj.weight = layers.{i}.attention.{wv,wo}.weight
model.layers.{i}.mlp.{gate,down,up}_proj.weight = layers.{i}.feed_forward.{w1,w2,w3}.weight
model.layers.{i}.{input,post_attention}_layernorm.weight = layers.{i}.{attention,ffn}_norm.weight
model.norm.weight = norm.weight
lm_head.weight = output.weight
*.rotary_emb.inv_freq = -
"""
"""Llama, between Hugging Face and Meta's original checkpoints, whose names torchtitan uses as well."""

LLAMA_MEGATRON = """\
# Llama: Hugging Face = Megatron Core. Pass d=, the size of a head, and pad=, the rows that pad the vocabulary, or 0;
# in the other direction also n=, the query heads of a group: heads / key-value heads.
model.embed_tokens.weight = embedding.word_embeddings.weight : v e = (v + pad) e
model.layers.{i}.self_attn.{q,k,v}_proj.weight = decoder.layers.{i}.self_attention.linear_qkv.weight :
    (g n d) e, (g d) e, (g d) e = (g (n + 1 + 1) d) e
model.layers.{i}.self_attn.o_proj.weight = decoder.layers.{i}.self_attention.linear_proj.weight
model.layers.{i}.mlp.{gate,up}_proj.weight = decoder.layers.{i}.mlp.linear_fc1.weight : f e, f e = (f + f) e
model.layers.{i}.mlp.down_proj.weight = decoder.layers.{i}.mlp.linear_fc2.weight
model.layers.{i}.input_layernorm.weight = decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight
model.layers.{i}.post_attention_layernorm.weight = decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight
model.norm.weight = decoder.final_layernorm.weight
lm_head.weight = output_layer.weight : v e = (v + pad) e
*.rotary_emb.inv_freq = -
"""
"""Llama, between Hugging Face and Megatron Core: queries, keys and values in one tensor, and so gate and up."""

MIXTRAL = """\
# Mixtral: the files of Hugging Face = the parameters in transformers 5, which has all experts in one tensor.
model.layers.{i}.block_sparse_moe.experts.{x}.{w1,w3}.weight = model.layers.{i}.mlp.experts.gate_up_proj :
    f e, f e = x (f + f) e
model.layers.{i}.block_sparse_moe.experts.{x}.w2.weight = model.layers.{i}.mlp.experts.down_proj : e f = x e f
model.layers.{i}.block_sparse_moe.gate.weight = model.layers.{i}.mlp.gate.weight
* = *
"""
"""Mixtral, between the files of Hugging Face and the parameters of a model of transformers 5."""

QWEN3_MOE = """\
# Qwen3-MoE: the files of Hugging Face = the parameters in transformers 5, which has all experts in one tensor.
model.layers.{i}.mlp.experts.{x}.{gate,up}_proj.weight = model.layers.{i}.mlp.experts.gate_up_proj :
    f e, f e = x (f + f) e
model.layers.{i}.mlp.experts.{x}.down_proj.weight = model.layers.{i}.mlp.experts.down_proj : e f = x e f
* = *
"""
"""Qwen3-MoE, between the files of Hugging Face and the parameters of a model of transformers 5."""

SHIPPED = {"llama": LLAMA, "llama-megatron": LLAMA_MEGATRON, "mixtral": MIXTRAL, "qwen3-moe": QWEN3_MOE}
"""The texts by name."""
