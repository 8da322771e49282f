#!/bin/bash
# A run under Slurm, on one machine or several with a shared file system:
#
#     sbatch deploy/slurm.sh runs/mine rl recipe.yaml model.path=Qwen/Qwen3-4B
#     sbatch --nodes=2 deploy/slurm.sh runs/mine rl recipe.yaml
#
# The first argument is the run directory, the second the stage. Slurm starts the job again after preemption or when a machine
# fails, and it continues from the last checkpoint. After the time limit, submit the same command again. Set VENV if the
# environment is not ./.venv.
#SBATCH --job-name=posttrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

if (($# < 2)); then
    echo "usage: sbatch deploy/slurm.sh RUN STAGE [RECIPE] [key=value ...]" >&2
    exit 2
fi
run=$1 stage=$2
shift 2
if compgen -G "$run/checkpoints/step_*" > /dev/null; then
    words=("$stage" --resume "$run")
else
    words=("$stage" "$@" "name=$(basename "$run")" "runs=$(dirname "$run")")
fi
gpus=${SLURM_GPUS_ON_NODE:-1}
# torchrun would set 1. AdamW in CPU memory (hardware.offload) needs all cores.
cpus=${SLURM_CPUS_PER_TASK:-$(nproc)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > gpus ? cpus / gpus : 1))}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Slurm sends SIGTERM to every process 180 s before the time limit; the run then saves a checkpoint and ends. torchrun
# would kill it after 30 s.
srun "${VENV:-.venv}/bin/torchrun" --nnodes "$SLURM_NNODES" --nproc-per-node "$gpus" --shutdown-timeout 170 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29500}" \
    -m posttrain.cli.main "${words[@]}"
