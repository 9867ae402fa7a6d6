"""Maps option names and values of other programs to ours, for error messages about unknown keys and values.

The names come from PyTorch (DDP, FSDP), DeepSpeed, Megatron-LM, MaxText, torchtitan, Axolotl, and Hugging Face's
Trainers; some are former names of ours. They are not accepted as aliases: the message suggests our name, and the user
types it.
"""

from meshtrain.errors import fold

# `our name: other names`. `option=value` is for switches; text with blanks is a hint if no single option is equivalent.
_OPTIONS = """
mesh.data: ddp dp data_parallel data_parallel_size dp_size dp_degree data_parallel_replicate_degree num_replicas
mesh.data: ici_data_parallelism dcn_data_parallelism mesh.replica dp_replicate
mesh.fsdp: fsdp fully_shard fsdp_size data_parallel_shard_degree dp_shard ici_fsdp_parallelism dcn_fsdp_parallelism
mesh.tensor: tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size tp_degree
mesh.tensor: mesh.model model_parallel_size ici_tensor_parallelism dcn_tensor_parallelism
mesh.pipeline: pp pipeline pipeline_parallel_size pipeline_model_parallel_size pp_size pipeline_parallel_degree
mesh.pipeline: pp_degree num_stages ici_pipeline_parallelism dcn_pipeline_parallelism mesh.stage
mesh.context: cp sp mesh.sequence mesh.seq context_parallel_size context_parallel_degree cp_size cp_degree sp_size
mesh.context: sequence_parallel_size ulysses_degree ici_context_parallelism ici_sequence_parallelism
mesh.expert: ep expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size ici_expert_parallelism
layout.sequence_parallel: sequence_parallel enable_sequence_parallel
zero.level: zero stage zero_stage zero_optimization
zero.strategy: sharding_strategy fsdp_sharding_strategy
offload.moments=true: offload_optimizer cpu_offload optimizer_offload optimizer_memory_host_offload
accumulation_steps: gradient_accumulation_steps grad_accum_steps gradient_accumulation accumulate_grad_batches
batch_size: global_batch_size train_batch_size training_batch_size effective_batch_size global_train_batch_size
pipeline.num_chunks: virtual_pipeline_parallel_size num_virtual_stages
sequence_length: seq_len seq_length max_seq_length max_seq_len max_length max_target_length sequence_len n_ctx
sequence_length: block_size context_length cutoff_len model_max_length max_len
num_steps: steps max_steps train_iters total_steps training_steps iterations max_iters num_train_steps
num_epochs: epochs num_train_epochs max_epochs
learning_rate.peak: lr learning_rate max_lr base_lr peak_lr
learning_rate.warmup_steps: warmup warmup_steps lr_warmup_iters num_warmup_steps warmup_iters lr_warmup_steps
learning_rate.name: lr_scheduler lr_scheduler_type lr_decay_style scheduler lr_schedule
optimizer.name: optimizer optim opt_type optimizer_type
optimizer.epsilon: adam_epsilon adam_eps eps
optimizer.clip_norm: clip_grad max_grad_norm gradient_clipping gradient_clipping_threshold max_norm grad_clip
precision.policy: precision dtype mixed_precision torch_dtype mp_policy mixed_precision_param
precision.policy=bfloat16: bf16 bfloat16 use_bf16
precision.policy=float16: fp16 float16 half use_fp16 amp
precision.param_dtype: weight_dtype params_dtype
remat.policy: remat activation_checkpointing gradient_checkpointing recompute recompute_granularity selective_ac
checkpoint.every: save_steps save_interval checkpoint_period save_every checkpoint_interval
checkpoint.keep_last: save_total_limit keep_latest_k max_to_keep keep_last_n
checkpoint.directory: output_dir save_dir checkpoint_dir dump_folder base_output_directory save
init_from: model_name_or_path base_model pretrained_model_name_or_path load_parameters_path model_name initial_load_path
eval_every: eval_steps eval_interval evaluation_steps val_check_interval
log_every: logging_steps log_interval log_freq log_period
data.path: data train_file data_path dataset dataset_name datasets train_data_path dataset_path hf_path train_files
data.validation_path: validation_file eval_file val_data_path eval_dataset valid_data_path
data.tokenizer: tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_model
lora.rank: lora r lora_r
lora.targets: target_modules lora_target_modules
model.num_layers: n_layers n_layer num_hidden_layers num_decoder_layers base_num_decoder_layers
model.embed_dim: hidden_size d_model dim n_embd emb_dim base_emb_dim
model.mlp_dim: intermediate_size ffn_hidden_size d_ff hidden_dim base_mlp_dim
model.num_heads: n_heads num_attention_heads n_head base_num_query_heads
model.num_kv_heads: n_kv_heads num_key_value_heads num_query_groups base_num_kv_heads
reduction.name: compression.kind
reduction.block: compression.block
reduction.kept: compression.kept
reduction.feedback: compression.feedback
reduction.name=one_step_late: local_steps.delay
model.moe.num_experts: num_local_experts n_routed_experts num_moe_experts
model.moe.experts_per_token: num_experts_per_tok moe_router_topk num_experts_per_token
model.moe.biases: expert_biases
model.rope.base: rope_theta rotary_base rope_max_timescale
model.latent.dim: kv_lora_rank
model.latent.query_dim: query_latent_dim q_lora_rank
model.norm.epsilon: rms_norm_eps layer_norm_eps layernorm_epsilon normalization_layer_epsilon
model.norm.post: post_norms
model.norm.pre: pre_norms
model.norm.qk: qk_norm qk_layernorm use_qk_norm
model.norm.qk_of_all: qk_norm_of_all
observe.tracker: report_to
observe.tracker=wandb: wandb use_wandb
batch_size (global) and accumulation_steps: micro_batch_size per_device_train_batch_size per_device_batch_size mbs
batch_size (global) and accumulation_steps: train_micro_batch_size_per_gpu local_batch_size device_batch_size
learning_rate.warmup_steps, a number of updates: warmup_ratio warmup_steps_fraction lr_warmup_fraction
learning_rate.final_fraction, a share of the peak: min_lr eta_min min_lr_ratio cosine_learning_rate_final_fraction
the same command with the same --workdir, which resumes: resume_from_checkpoint resume load
`launch --processes=N`, or Slurm's or Kubernetes' variables: world_size nproc_per_node nnodes num_processes rank
`launch --processes=N`, or Slurm's or Kubernetes' variables: local_rank master_addr master_port num_gpus num_nodes
"""
# `option=value: other values`. A value that differs only in case or punctuation needs no row.
_VALUES = """
precision.policy=bfloat16: bf16 bf16_mixed
precision.policy=float16: fp16 half amp true 16_mixed
precision.policy=float32: fp32 no none false full 32
remat.policy=full: true block uniform everything
remat.policy=none: false no off null
optimizer.name=adamw: adamw_torch adamw_torch_fused adamw_hf fused_adam paged_adamw adamw_pax
learning_rate.name=constant: constant_with_warmup
learning_rate.name=warmup_stable_decay: wsd
data.packing=first_fit: true bfd
data.packing=stream: false wrapped
"""


def _pairs(table: str) -> list[tuple[str, str]]:
    rows = [line.partition(": ") for line in table.strip().splitlines()]
    return [(fold(word), ours) for ours, _, words in rows for word in words.split()]


OPTIONS = dict(_pairs(_OPTIONS))  # case-folded name of another program -> our option, `option=value` or a hint
# (our option, case-folded value of another program) -> our value
VALUES = {(ours.partition("=")[0], word): ours.partition("=")[2] for word, ours in _pairs(_VALUES)}
