python3 checkpoint/plot_logs.py

deepspeed --module openrlhf.cli.train_sft \
   --max_len 4096\
   --dataset data_processing/sft/rationales_sft_train.parquet \
   --eval_dataset data_processing/sft/rationales_sft_val.parquet \
   --input_key messages \
   --apply_chat_template \
   --train_batch_size 64\
   --micro_train_batch_size 8\
   --max_samples 5000 \
   --pretrain Qwen/Qwen3-4B \
   --save_path ./checkpoint/qwen3-4B-sft-rat2 \
   --save_steps -1 \
   --logging_steps 1 \
   --eval_steps 5 \
   --use_tensorboard ./checkpoint/qwen3-4B-sft-rat2/ \
   --zero_stage 2 \
   --max_epochs 3\
   --packing_samples \
   --bf16 \
   --learning_rate 4.68e-5 \
   --gradient_checkpointing \
   --adam_offload \

VLLM_USE_FLASHINFER_SAMPLER=0 deepspeed --module openrlhf.cli.train_dpo --save_path ./checkpoint/qwen3-4B-sft-dpo-rat2 \
   --save_steps -1 \
   --use_tensorboard ./checkpoint/qwen3-4B-sft-dpo-rat2/ \
   --logging_steps 1 \
   --eval_steps 5\
   --train_batch_size 240\
   --micro_train_batch_size 3\
   --pretrain ./checkpoint/qwen3-4B-sft-rat2 \
   --bf16 \
   --max_epochs 1\
   --max_len 4096\
   --zero_stage 3\
   --learning_rate 5e-7 \
   --beta 0.1 \
   --max_samples 10000\
   --dataset ./data_processing/preferences/rationales_preference_train.parquet \
   --eval_dataset ./data_processing/preferences/rationales_preference_val.parquet \
   --apply_chat_template \
   --chosen_key chosen \
   --rejected_key rejected \
   --attn_implementation flash_attention_2 \
   --load_checkpoint \
   --packing_samples \
   --gradient_checkpointing \
   --adam_offload \

deepspeed --module openrlhf.cli.train_rm \
   --save_path ./checkpoint/qwen3-4B-sft-rm-rat2\
   --save_steps -1 \
   --logging_steps 1 \
   --eval_steps 5 \
   --train_batch_size 512\
   --micro_train_batch_size 32 \
   --pretrain ./checkpoint/qwen3-4B-sft-rat2 \
   --bf16 \
   --max_samples 10000 \
   --max_epochs 3\
   --max_len 4096 \
   --zero_stage 1 \
   --learning_rate 4e-5 \
   --dataset ./data_processing/preferences/rationales_preference_train.parquet \
   --eval_dataset ./data_processing/preferences/rationales_preference_val.parquet \
   --use_tensorboard ./checkpoint/qwen3-4B-sft-rm-rat2/ \
   --apply_chat_template \
   --chosen_key chosen \
   --rejected_key rejected \
   --packing_samples \
   --gradient_checkpointing \
   --value_head_prefix score

ray start --head --node-ip-address 0.0.0.0 --num-gpus 8

python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 \
   --ref_num_gpus_per_node 1 \
   --reward_num_nodes 1 \
   --reward_num_gpus_per_node 1 \
   --critic_num_nodes 1 \
   --critic_num_gpus_per_node 2 \
   --actor_num_nodes 1 \
   --actor_num_gpus_per_node 2 \
   --vllm_num_engines 2\
   --vllm_tensor_parallel_size 1 \
   --vllm_gpu_memory_utilization 0.75 \
   --packing_samples \
   --vllm_sync_backend gloo \
   --vllm_enable_sleep \
   --enforce_eager \
   --pretrain ./checkpoint/qwen3-4B-sft-rat2 \
   --reward_pretrain ./checkpoint/qwen3-4B-sft-rm-rat2 \
   --save_path ./checkpoint/qwen3-4B-sft-ppo-rat2/final \
   --ckpt_path ./checkpoint/qwen3-4B-sft-ppo-rat2/ckpt \
   --save_hf_ckpt \
   --micro_train_batch_size 16\
   --train_batch_size 512\
   --micro_rollout_batch_size 32\
   --rollout_batch_size 256\
   --n_samples_per_prompt 2\
   --enable_prefix_caching \
   --max_epochs 2\
   --prompt_max_len 4096\
   --max_samples 10000 \
   --generate_max_len 2048\
   --zero_stage 3\
   --bf16 \
   --actor_learning_rate 6.57e-6 \
   --critic_learning_rate 2.34e-6 \
   --init_kl_coef 0.01 \
   --prompt_data ./data_processing/prompts/rationales_prompts_train.parquet \
   --input_key context_messages \
   --apply_chat_template \
   --use_tensorboard ./checkpoint/qwen3-4B-sft-ppo-rat2 \
   --normalize_reward \
   --adam_offload \
   --deepspeed_enable_sleep \
   --gradient_checkpointing \

ray start --head --node-ip-address 0.0.0.0 --num-gpus 8

python3 -m openrlhf.cli.train_drca_ray \
   --ref_num_nodes 1 \
   --ref_num_gpus_per_node 1 \
   --reward_num_nodes 1 \
   --reward_num_gpus_per_node 1 \
   --critic_num_nodes 1 \
   --critic_num_gpus_per_node 2 \
   --actor_num_nodes 1 \
   --actor_num_gpus_per_node 2 \
   --vllm_num_engines 2\
   --vllm_tensor_parallel_size 1 \
   --vllm_gpu_memory_utilization 0.75 \
   --packing_samples \
   --vllm_sync_backend gloo \
   --vllm_enable_sleep \
   --enforce_eager \
   --pretrain ./checkpoint/qwen3-4B-sft-rat2 \
   --reward_pretrain ./checkpoint/qwen3-4B-sft-rm-rat2 \
   --save_path ./checkpoint/qwen3-4B-sft-drca-cf-rat2/final \
   --ckpt_path ./checkpoint/qwen3-4B-sft-drca-cf-rat2/ckpt \
   --save_hf_ckpt \
   --save_steps -1\
   --logging_steps 1 \
   --micro_train_batch_size 16\
   --train_batch_size 512\
   --micro_rollout_batch_size 32\
   --rollout_batch_size 256\
   --n_samples_per_prompt 2\
   --enable_prefix_caching \
   --max_epochs 1\
   --prompt_max_len 4096\
   --max_samples 10000\
   --generate_max_len 2048\
   --zero_stage 3 \
   --bf16 \
   --actor_learning_rate 6.57e-6 \
   --critic_learning_rate 2.34e-6 \
   --init_kl_coef 0.01 \
   --prompt_data ./data_processing/prompts/rationales_prompts_train.parquet \
   --input_key context_messages \
   --apply_chat_template \
   --use_tensorboard ./checkpoint/qwen3-4B-sft-drca-cf-rat2/ \
   --gradient_checkpointing \
   --deepspeed_enable_sleep \
   --adam_offload \
   --normalize_reward \
   --max_units_per_sequence 10 \
   --drca_beta 0.8 \
   --unit_extraction "regex" \

bash examples/scripts/train_seg_rm.sh train_seg_rm qwen3 rationales 3 peak 1.5 avg 0.02

bash examples/scripts/run_fit_function.sh ../checkpoint/qwen3-4B-sft-denserm-rat2/final_model peak 1.5 avg

python3 useful_code/plot_logfit_function_sklearn.py

bash examples/scripts/train_ppo_segment.sh ppo_segment_rm_training qwen3 rationales 1 peak 1.5 avg segment_normalization 0.5 rationales 0.1

bash examples/scripts/train_ppo_segment.sh ppo_segment_rm_training qwen3 rationales 1 peak 1000 avg segment_last_avg 0.5 rationales

python3 ../hyperparameter_tuning/optuna_<model>_tuning.py

evaluation/run_multigpu_inference.sh \
    ./checkpoint/<name>/final \ 
    ./data_processing/sft/rationales_sft_test.parquet \
    ./evaluation/generated_data/<name>.jsonl \
    8 \
    "" \
    2048 \

python3 evaluation/automated_metrics/compute_all_metrics.py \
  --predictions_file evaluation/generated_data/<name>.jsonl \
  --output_file evaluation/results/<name>.json \
  --num_gpus 8 \
  --batch_size 3

python3 evaluation/llm-as-a-judge/<metric>_judge.py \
  --input evaluation/generated_data/<name>.jsonl \
  --output evaluation/results/<name>.json \
  --workers 50 \
  --max-samples 5000 \

python3 evaluation/llm-as-a-judge/aggregate_<metric>.py \
  --input evaluation/results/<name>.json \

python3 evaluation/reward_metric.py --model_path ./checkpoint/<name> \
--data_path evaluation/generated_data/<name>.jsonl \
--output_path evaluation/results/<name>.jsonl \

python3 evaluation/generate_baseline_rationales.py \
--input ./data_processing/sft/rationales_sft_test.parquet \
