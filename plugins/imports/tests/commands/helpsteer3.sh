python reward_model_training.py \
    --output_dir models/qwen3_8b_reward_model \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-5 \
    --num_train_epochs 3 \
    --max_length 1024 \
    --use_peft \
    --lora_r 16 \
    --lora_alpha 32

python rloo_helpsteer_training.py \
    --output_dir models/rloo_helpsteer3 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --learning_rate 1e-6 \
    --total_episodes 50000 \
    --num_ppo_epochs 1 \
    --num_mini_batches 1 \
    --rloo_k 4 \
    --local_rollout_forward_batch_size 2 \
    --missing_eos_penalty 1.0 \
    --reward_model_path models/qwen3_8b_reward_model

# Run the complete pipeline with default settings
python train_pipeline.py

# Run with custom settings
python train_pipeline.py \
    --reward_batch_size 4 \
    --reward_epochs 3 \
    --rloo_batch_size 2 \
    --total_episodes 50000 \
    --use_peft

# Train only the reward model
python train_pipeline.py --reward_model_only

# Run only RLOO training (if reward model already exists)
python train_pipeline.py --rloo_only --reward_model_dir models/qwen3_8b_reward_model

# Step 1: Train the reward model
python reward_model_training.py \
    --output_dir models/qwen3_8b_reward_model \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-5 \
    --num_train_epochs 3 \
    --use_peft \
    --lora_r 16 \
    --lora_alpha 32

# Step 2: Use the reward model for RLOO training
python rloo_helpsteer_training.py \
    --output_dir models/rloo_helpsteer3 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --learning_rate 1e-6 \
    --total_episodes 50000 \
    --rloo_k 4 \
    --reward_model_path models/qwen3_8b_reward_model
