GPUS_PER_NODE=8
NNODES=4
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_port 6000"
GPT_ARGS="
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --seq-length 4096 --max-position-embeddings 32768 --tokenizer-type Llama2Tokenizer
    --num-experts 8 --moe-layer-freq ([0]*1+[1]*31) --moe-shared-expert-intermediate-size 2048
    --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type flex --moe-enable-deepep --moe-grouped-gemm
    --recompute-granularity selective --recompute-modules moe_act layernorm
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --micro-batch-size 1 --global-batch-size 128 --bf16 \
    --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 \
    --expert-tensor-parallel-size 1 --overlap-moe-expert-parallel-comm --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer
