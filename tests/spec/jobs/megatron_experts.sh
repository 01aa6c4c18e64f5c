GPUS_PER_NODE=8
NNODES=4
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_port 6000"
GPT_ARGS="
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --seq-length 4096 --max-position-embeddings 32768 --tokenizer-type Llama2Tokenizer
    --num-experts 8 --moe-router-topk 2
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --micro-batch-size 1 --global-batch-size 128 --bf16 \
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer
