"""What other fine-tuning tools call our keys, so that a message can name ours.

Names are those of mlx-lm, TRL and transformers' TrainingArguments, PEFT, axolotl, unsloth,
LLaMA-Factory and torchtune, in lower case with underscores. Each gives our key, or a sentence
that says where the same thing is found.
"""

_MEANT: dict[str, str] = {
    "optimizer.lr": "learning_rate lr peak_lr max_lr",
    "optimizer.name": "optim optimizer_name optimizer_type",
    "optimizer.betas": "adam_betas",
    "optimizer.betas, both in a list: optimizer.betas=[0.9,0.999]": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon adam_eps",
    "optimizer.weight_decay": "wd",
    "schedule.name": "lr_scheduler_type lr_scheduler lr_schedule scheduler",
    "schedule.warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "schedule.warmup_steps, a number of optimiser steps": "warmup_ratio",
    "schedule.final_ratio, the last learning rate over the highest": (
        "min_lr min_lr_ratio cosine_min_lr_ratio lr_end"
    ),
    "trainer.max_steps": (
        "iters max_iters num_iters num_steps train_steps total_steps max_steps_per_epoch steps"
    ),
    "trainer.epochs": "num_train_epochs num_epochs n_epochs",
    "trainer.accumulate": (
        "gradient_accumulation_steps grad_accumulation_steps accumulation_steps grad_accum "
        "gradient_accumulation grad_accum_steps"
    ),
    "trainer.clip_norm": "max_grad_norm grad_clip gradient_clipping clip_grad_norm max_norm",
    "trainer.gradient=checkpoint": (
        "grad_checkpoint gradient_checkpointing use_gradient_checkpointing activation_checkpointing "
        "enable_activation_checkpointing grad_checkpointing"
    ),
    "trainer.layout": "packing sample_packing pack",
    "trainer.objective": "train_mode rl stage loss_type",
    "trainer.seed": "random_state data_seed random_seed",
    "trainer.eval_every": (
        "eval_steps steps_per_eval eval_interval evals_per_epoch eval_strategy evaluation_strategy val_every"
    ),
    "trainer.save_every": (
        "save_steps save_interval saves_per_epoch save_strategy checkpoint_every steps_per_save"
    ),
    "trainer.keep": "save_total_limit keep_last keep_last_n_checkpoints",
    "trainer.patience": "early_stopping_patience early_stopping early_stop",
    "trainer.min_delta": "early_stopping_threshold",
    "trainer.resume": "resume_from_checkpoint auto_resume_from_checkpoints resume_training",
    "trainer.save_only_adapter": "save_only_model save_adapter_weights_only",
    "model.path": (
        "model_name_or_path model_name base_model model_id hf_path pretrained_model_name_or_path "
        "model_path checkpoint_dir"
    ),
    "model.revision": "model_revision revision_of_model",
    "model.dtype": "torch_dtype bf16 fp16 precision",
    "model.new_tokens": "add_tokens tokens added_tokens trainable_token_indices",
    "model.new_special_tokens": (
        "special_tokens add_special_tokens additional_special_tokens extra_special_tokens"
    ),
    "data.train": "dataset datasets train_file dataset_name data_path train_data train_path",
    "data.valid": (
        "valid_file validation_file eval_dataset test_datasets val_data valid_data val_set_size eval_file"
    ),
    "data.max_length": (
        "max_seq_length max_seq_len sequence_len cutoff_len max_len seq_length seq_len model_max_length "
        "context_length block_size"
    ),
    "data.batch_size": (
        "per_device_train_batch_size micro_batch_size train_batch_size batch per_device_eval_batch_size "
        "eval_batch_size batchsize bs"
    ),
    "data.train_on, which is the assistant's turns unless you say otherwise": (
        "mask_prompt train_on_inputs assistant_only_loss completion_only_loss train_on_prompt "
        "train_on_responses_only roles_to_train train_on_input"
    ),
    "data.truncate": "truncation truncation_mode truncation_side",
    "data.columns, {ours: theirs}": (
        "prompt_feature completion_feature chat_feature text_feature dataset_text_field text_column "
        "column_map"
    ),
    "data.format": "chat_template dataset_type data_type",
    "data.num_workers": "preprocessing_num_workers dataset_num_proc dataset_processes num_proc",
    "data.cache": "overwrite_cache dataset_prepared_path use_cache load_from_cache_file",
    "data.buffer": "buffer_size shuffle_buffer shuffle_buffer_size",
    "data.subset": "dataset_config dataset_config_name config_name",
    "data.split": "train_split dataset_split dataset_train_split",
    "data.train, {path: ..., weight: ...} for each set": (
        "interleave_probs mix_strategy mixing_weights dataset_weights"
    ),
    "adapter.rank": "lora_r r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.alpha; its scale is alpha / rank": "scale lora_scale lora_scaling",
    "adapter.rslora": "use_rslora rank_stabilized rs_lora",
    "adapter.kind=dora": "use_dora",
    "adapter.modules_to_save": "lora_modules_to_save additional_target additional_trainable",
    "optimizer.lora_plus_ratio": "loraplus_lr_ratio lora_plus lora_plus_lr_ratio loraplus_ratio",
    "trainer.neftune_alpha": "neftune_noise_alpha noise_alpha",
    "schedule.decay_share, the share of all steps that wsd falls in": "num_decay_steps decay_ratio",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": (
        "lora_target_modules target_modules lora_target keys lora_keys lora_attn_modules lora_target_linear"
    ),
    "adapter.layers, for example adapter.layers=16, the last 16": (
        "num_layers lora_layers layers_to_transform num_lora_layers"
    ),
    "adapter.kind": "fine_tune_type adapter_type finetuning_type peft_type use_lora use_peft",
    "adapter.init_from": "resume_adapter_file adapter_name_or_path lora_model_dir",
    "run.dir, the run's folder, where the adapter is written; a starting adapter is adapter.init_from": (
        "adapter_path output_dir save_dir save_path output out_dir adapter_file"
    ),
    "always on: every step is logged in the run's metrics.jsonl": (
        "steps_per_report logging_steps log_every log_every_n_steps logging_strategy"
    ),
    "the whole validation set, always; give a smaller file as data.valid": "val_batches eval_batches",
    "adapter.kind=full": "full_finetune full_finetuning full_fine_tune",
    "max_tokens of mlxft generate": "max_new_tokens max_completion_tokens num_predict",
    "temperature of mlxft generate": "temp",
}

ALIASES: dict[str, str] = {name: ours for ours, names in _MEANT.items() for name in names.split()}
