"""Keys of published `config.json` files without an effect on the model's outputs, ignored for every family.

A key belongs here if no forward pass depends on its value. A key that repeats another key, or is harmless only at one
value, belongs to its family (`ConfigMap.silent`, `ConfigMap.fixed`).
"""

__all__ = ["HARMLESS_KEYS"]

_ORIGIN = """
    _class_name _commit_hash _diffusers_version _name_or_path architectures auto_map finetuning_task is_llama_config
    model_type transformers.js_config transformers_version unsloth_fixed unsloth_version
"""
_STORAGE_AND_EXECUTION = """
    _attn_implementation _attn_implementation_autoset attn_implementation cache_implementation chunk_size_feed_forward
    dtype ep_size gradient_checkpointing low_cpu_mem_usage return_dict tf_legacy_loss torch_dtype torchscript
    use_bfloat16 use_cache use_flash_attn use_reentrant_checkpointing
"""
_TRAINING = """
    attention_dropout attn_pdrop aux_loss_alpha classifier_dropout dropout dropout_rate embd_pdrop embedding_dropout
    hidden_dropout initializer_factor neftune_noise_alpha output_router_logits resid_pdrop router_aux_loss_coef seq_aux
"""
_TEXT = """
    bos_token_id decoder_start_token_id eos_token_id id2label label2id pad_token_id prefix problem_type sep_token_id
    task_specific_params tokenizer_class
"""
# transformers 4 wrote generation settings to `config.json`; they are in `generation_config.json` now.
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length min_p no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    temperature top_k top_p typical_p
"""

HARMLESS_KEYS = frozenset(f"{_ORIGIN} {_STORAGE_AND_EXECUTION} {_TRAINING} {_TEXT} {_GENERATION}".split())
