"""Keys of Hugging Face's config.json that the architectures' classes do not read, or not for the logits.

What a class of transformers reads is in `models.hf.families`. tests/data/hf_reads.json has what transformers 5.24 reads
while it makes and runs each model; 4.33, 4.46, 4.51 and 4.57 were looked through by hand.
"""

import json
from typing import Any

# Keys that change no logits, each line after its reason.
_MEANINGLESS = """
read with the file: architectures model_type
of the writer: _name_or_path name_or_path model_name _commit_hash transformers_version auto_map dtype torch_dtype
  _pre_quantization_dtype unsloth_version unsloth_fixed transformers.js_config is_llama_config tokenizer_class prefix
  tokenizer_model_max_length tokenizer_padding_side model_max_length max_sequence_length max_seq_length max_seq_len
  seq_length
of tokens, and of generation (end_token reads eos_token_id): bos_token_id eos_token_id pad_token_id sep_token_id
  unk_token_id mask_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id use_cache min_p top_k top_p
  cache_implementation max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams
  num_beam_groups num_return_sequences temperature typical_p repetition_penalty length_penalty diversity_penalty
  no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens output_scores
  remove_invalid_values exponential_decay_length_penalty return_dict_in_generate
of the first weights: initializer_range rescale_prenorm_residual
of training: attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob residual_dropout
  resid_pdrop embd_pdrop attn_pdrop embedding_dropout classifier_dropout router_jitter_noise neftune_noise_alpha
  gradient_checkpointing
of the loss: output_router_logits router_aux_loss_coef router_z_loss_coef aux_loss_alpha seq_aux tf_legacy_loss
of other results: output_attentions output_hidden_states return_dict tie_last_hidden_states
of other tasks: id2label label2id num_labels problem_type finetuning_task task_specific_params is_decoder
  cross_attention_hidden_size
of how it is computed, not what: _attn_implementation attn_implementation _attn_implementation_internal
  _attn_implementation_autoset _experts_implementation experts_implementation _flash_attn_2_enabled use_flash_attn
  use_flash_attention use_flash_attention_2 use_mla pretraining_tp ep_size chunk_size_feed_forward torchscript
  use_bfloat16 xla_device
layers after the last, which are not loaded: num_nextn_predict_layers num_mtp_layers
which layers have a window, where there is one: max_window_layers
original_max_position_embeddings, num_experts_per_tok and the sum of two sizes, again: initial_context_length
  experts_per_token qk_head_dim
"""
MEANINGLESS = frozenset(key for line in _MEANINGLESS.splitlines() for key in line.rpartition(":")[2].split())
# The same, of rope_parameters and rope_scaling.
MEANINGLESS_OF_ROPE = ("attn_factor", "finetuned", "mrope_section", "mrope_interleaved")

# Values at which a key describes what a class computes that does not read it.
NEUTRAL = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "attention_out_bias"), False),
    **dict.fromkeys(("use_sliding_window", "use_mrope", "rope_interleaved", "rope_interleave", "alibi"), False),
    **dict.fromkeys(
        ("use_qk_norm", "qk_layernorm", "add_cross_attention", "tie_encoder_decoder", "is_encoder_decoder"), False
    ),
    **dict.fromkeys(("is_causal", "norm_topk_prob"), True),
    **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "decoder_sparse_step", "moe_layer_freq"), 1),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), 0),
    "mlp_only_layers": [],
    "pruned_heads": {},
}
# Keys that transformers reads for every model, whatever its class.
READ_FOR_ALL = (
    *("is_causal", "per_layer_config", "fusion_config", "kv_sharing_modes", "transformers_weights"),
    *("attention_chunk_size", "sliding_window", "layer_types"),
)


def says_nothing(key: str, given: dict[str, Any]) -> bool:
    """Whether a key that the class does not read says what the class computes anyway."""
    if key == "sliding_window":
        return given.get("use_sliding_window") is False
    return key in NEUTRAL and json.dumps(NEUTRAL[key]) == json.dumps(given[key])
