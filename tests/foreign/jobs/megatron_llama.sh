#!/bin/bash
# Llama 3.1 8B on four nodes.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=4
PP=${PP:-2}
SEQ=8192
MODEL_ARGS=(
    --num-layers 32   # decoder layers
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length $SEQ
    --max-position-embeddings 131072
    --swiglu --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0
    --vocab-size 128256
)
TRAIN="--micro-batch-size 1 --global-batch-size $((16*8)) --bf16 --lr 1e-4 --use-distributed-optimizer"
srun python pretrain_gpt.py ${MODEL_ARGS[@]} $TRAIN --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP --sequence-parallel --recompute-activations \
    --overlap-grad-reduce --overlap-param-gather --surprising-option 3
