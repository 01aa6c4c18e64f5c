"""Config.json files of public decoders, and the parameters of their checkpoints.

Source: the files config.json of the named models on the Hugging Face Hub, without keys that change
no shape; the totals are those of the checkpoints (safetensors index or model card), each tied
matrix once.
"""

from typing import Any


def llama(kind: str, *shape: int, **more: Any) -> dict[str, Any]:
    """A config with the keys of Llama: hidden, ffn, layers, heads, KV heads (0: no key), vocab."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size")
    found = {name: value for name, value in zip(names, shape, strict=True) if value}
    return {"model_type": kind, **found, **more}


SILU = {"hidden_act": "silu", "tie_word_embeddings": False}
GELU = {"hidden_act": "gelu"}
TIED = {"hidden_act": "silu", "tie_word_embeddings": True}

PUBLIC: dict[str, tuple[dict[str, Any], int]] = {
    "albert-base-v2": (  # without pooler, sentence-order head and the output projection's bias
        {
            **llama("albert", 768, 3072, 12, 12, 0, 30000, hidden_act="gelu_new"),
            **{"embedding_size": 128, "num_hidden_groups": 1, "max_position_embeddings": 512},
        },
        11_191_680,
    ),
    "Llama-3.2-1B": (llama("llama", 2048, 8192, 16, 32, 8, 128256, **TIED), 1_235_814_400),
    "TinyLlama-1.1B": (llama("llama", 2048, 5632, 22, 32, 4, 32000, **SILU), 1_100_048_384),
    "SmolLM2-1.7B": (llama("llama", 2048, 8192, 24, 32, 32, 49152, **TIED), 1_711_376_384),
    "deepseek-llm-7b": (llama("llama", 4096, 11008, 30, 32, 32, 102400, **SILU), 6_910_365_696),
    "Yi-34B": (llama("Yi", 7168, 20480, 60, 56, 8, 64000, **SILU), 34_388_917_248),
    "Qwen2.5-0.5B": (llama("qwen2", 896, 4864, 24, 14, 2, 151936, **TIED), 494_032_768),
    "Qwen2.5-32B": (llama("qwen2", 5120, 27648, 64, 40, 8, 152064, **SILU), 32_763_876_352),
    "Qwen3-8B": (
        llama("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, **SILU),
        8_190_735_360,
    ),
    "Qwen-7B": (
        llama("qwen", 4096, 22016, 32, 32, 0, 151936, kv_channels=128, no_bias=True),
        7_721_324_544,
    ),
    "Mistral-Nemo-12B": (
        llama("mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None),
        12_247_782_400,
    ),
    "phi-4": (llama("phi3", 5120, 17920, 40, 40, 10, 100352, **SILU), 14_659_507_200),
    "Phi-3-mini": (llama("phi3", 3072, 8192, 32, 32, 32, 32064, **SILU), 3_821_079_552),
    "Phi-4-mini": (
        llama("phi3", 3072, 8192, 32, 24, 8, 200064, partial_rotary_factor=0.75, **TIED),
        3_836_021_760,
    ),
    "phi-2": (llama("phi", 2560, 10240, 32, 32, 32, 51200), 2_779_683_840),
    "gemma-2b": (
        llama("gemma", 2048, 16384, 18, 8, 1, 256000, head_dim=256, hidden_act="gelu"),
        2_506_172_416,
    ),
    "gemma-7b": (llama("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256), 8_537_680_896),
    "gemma-2-2b": (llama("gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256), 2_614_341_888),
    "gemma-2-27b": (
        llama("gemma2", 4608, 36864, 46, 32, 16, 256000, head_dim=128),
        27_227_128_320,
    ),
    "gemma-3-1b": (
        llama("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512),
        999_885_952,
    ),
    "internlm2-7b": (
        llama("internlm2", 4096, 14336, 32, 32, 8, 92544, bias=False, **SILU),
        7_737_708_544,
    ),
    "internlm2-20b": (
        llama("internlm2", 6144, 16384, 48, 48, 8, 92544, bias=False, **SILU),
        19_861_149_696,
    ),
    "Baichuan2-7B": (llama("baichuan", 4096, 11008, 32, 32, 0, 125696, **SILU), 7_505_973_248),
    "Baichuan2-13B": (llama("baichuan", 5120, 13696, 40, 40, 0, 125696, **SILU), 13_896_668_160),
    "MiniCPM-2B": (llama("minicpm", 2304, 5760, 40, 36, 36, 122753), 2_724_880_896),
    "OLMo-2-7B": (llama("olmo2", 4096, 11008, 32, 32, 32, 100352, **SILU), 7_298_617_344),
    "OLMo-7B": (llama("olmo", 4096, 11008, 32, 32, 32, 50304, **SILU), 6_888_095_744),
    "OLMo-1B": (llama("olmo", 2048, 8192, 16, 16, 16, 50304, **TIED), 1_176_764_416),
    "SmolLM3-3B": (llama("smollm3", 2048, 11008, 36, 16, 4, 128256, **TIED), 3_075_098_624),
    "Seed-OSS-36B": (
        llama("seed_oss", 5120, 27648, 64, 80, 8, 155136, head_dim=128, attention_bias=True),
        36_151_104_512,
    ),
    "ERNIE-4.5-0.3B": (
        llama("ernie4_5", 1024, 3072, 18, 16, 2, 103424, head_dim=128, use_bias=False, **TIED),
        360_748_032,
    ),
    "GLM-4-9B": (
        llama("glm", 4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True),
        9_399_951_360,
    ),
    "GLM-4-32B-0414": (
        llama("glm4", 6144, 23040, 61, 48, 2, 151552, head_dim=128, attention_bias=False),
        32_566_081_536,
    ),
    "chatglm3-6b": (
        {
            "model_type": "chatglm", "num_layers": 28, "padded_vocab_size": 65024,
            "hidden_size": 4096, "ffn_hidden_size": 13696, "kv_channels": 128,
            "num_attention_heads": 32, "seq_length": 8192, "rmsnorm": True,
            "add_bias_linear": False, "add_qkv_bias": True, "multi_query_attention": True,
            "multi_query_group_num": 2,
        },
        6_243_584_000,
    ),
    "EXAONE-3.5-7.8B": (
        {
            "model_type": "exaone", "hidden_size": 4096, "intermediate_size": 14336,
            "num_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 102400, "activation_function": "silu",
            "tie_word_embeddings": False,
        },
        7_818_448_896,
    ),
    "EXAONE-4.0-32B": (
        llama("exaone4", 5120, 27392, 64, 40, 8, 102400, head_dim=128, sliding_window=4096,
              sliding_window_pattern="LLLG", **SILU),
        32_003_216_384,
    ),
    "command-r-v01": (llama("cohere", 8192, 22528, 40, 64, 64, 256000), 34_980_831_232),
    "aya-23-8B": (llama("cohere", 4096, 14336, 32, 32, 8, 256000), 8_028_033_024),
    "command-r7b": (
        llama("cohere2", 4096, 14336, 32, 32, 8, 256000, sliding_window=4096),
        8_028_033_024,
    ),
    "stablelm-3b-4e1t": (
        llama("stablelm", 2560, 6912, 32, 32, 32, 50304, partial_rotary_factor=0.25, **SILU),
        2_795_443_200,
    ),
    "stablelm-2-1_6b": (
        llama("stablelm", 2048, 5632, 24, 32, 32, 100352, use_qkv_bias=True, **SILU),
        1_644_515_328,
    ),
    "stablelm-2-12b": (
        llama("stablelm", 5120, 13824, 40, 32, 8, 100352, use_parallel_residual=True,
              qk_layernorm=True, **SILU),
        12_143_185_920,
    ),
    "starcoder2-3b": (
        llama("starcoder2", 3072, 12288, 30, 24, 2, 49152, hidden_act="gelu_pytorch_tanh"),
        3_030_371_328,
    ),
    "starcoder": (
        {
            "model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40,
            "n_inner": 24576, "n_positions": 8192, "vocab_size": 49152, "multi_query": True,
            "activation_function": "gelu",
        },
        15_517_456_384,
    ),
    "gpt2-xl": (
        {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024,
         "vocab_size": 50257, "activation_function": "gelu_new"},
        1_557_611_200,
    ),
    "gpt-j-6b": (
        {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048,
         "vocab_size": 50400, "rotary_dim": 64, "activation_function": "gelu_new"},
        6_050_882_784,
    ),
    "gpt-neo-2.7B": (
        {"model_type": "gpt_neo", "hidden_size": 2560, "num_heads": 20, "num_layers": 32,
         "vocab_size": 50257, "max_position_embeddings": 2048, "window_size": 256,
         "attention_types": [[["global", "local"], 16]], "activation_function": "gelu_new"},
        2_651_307_520,
    ),
    "gpt-neox-20b": (
        llama("gpt_neox", 6144, 24576, 44, 64, 0, 50432, rotary_pct=0.25, hidden_act="gelu_fast"),
        20_554_567_680,
    ),
    "pythia-6.9b": (
        llama("gpt_neox", 4096, 16384, 32, 32, 0, 50432, use_parallel_residual=True, **GELU),
        6_857_302_016,
    ),
    "bloom": (
        {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112,
         "vocab_size": 250880, "seq_length": 2048},
        176_247_271_424,
    ),
    "bloom-560m": (
        {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16,
         "vocab_size": 250880},
        559_214_592,
    ),
    "opt-6.7b": (
        {"model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32,
         "num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048,
         "word_embed_proj_dim": 4096, "do_layer_norm_before": True},
        6_658_473_984,
    ),
    "falcon-7b": (
        {"model_type": "RefinedWebModel", "hidden_size": 4544, "n_head": 71, "n_layer": 32,
         "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False,
         "alibi": False},
        6_921_720_704,
    ),
    "falcon-rw-1b": (
        {"model_type": "falcon", "hidden_size": 2048, "num_attention_heads": 32,
         "num_hidden_layers": 24, "vocab_size": 50304, "alibi": True, "bias": True,
         "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False},
        1_311_625_216,
    ),
    "falcon-40b": (
        {"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128,
         "num_hidden_layers": 60, "num_kv_heads": 8, "vocab_size": 65024,
         "new_decoder_architecture": True, "parallel_attn": True, "bias": False, "alibi": False,
         "num_ln_in_parallel_attn": None},
        41_303_293_952,
    ),
    "mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048,
         "expansion_ratio": 4, "vocab_size": 50432, "no_bias": True,
         "attn_config": {"alibi": True, "attn_type": "multihead_attention", "qk_ln": False}},
        6_649_286_656,
    ),
    "MiniCPM3-4B": (
        llama("minicpm3", 2560, 6400, 62, 40, 40, 73448, q_lora_rank=768, kv_lora_rank=256,
              qk_nope_head_dim=64, qk_rope_head_dim=32, **TIED),
        4_073_875_968,
    ),
    "Apertus-8B": (
        llama("apertus", 4096, 21504, 32, 32, 8, 131072, hidden_act="xielu"),
        8_053_338_176,
    ),
}  # fmt: skip

QWEN3_MOE = {**SILU, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
             "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
GPT_OSS = {**SILU, "head_dim": 64, "num_experts_per_tok": 4, "attention_bias": True,
           "sliding_window": 128}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
GLM = {**SILU, "head_dim": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
       "attention_bias": True, "partial_rotary_factor": 0.5,
       "num_nextn_predict_layers": 1}  # fmt: skip
LATENT = {**SILU, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
          "v_head_dim": 128, "moe_layer_freq": 1}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLAMA4 = {**SILU, "head_dim": 128, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1,
          "attention_chunk_size": 8192}  # fmt: skip

EXPERTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "Qwen3-30B-A3B": (
        llama("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768, **QWEN3_MOE),
        30_532_122_624, 3_353_032_704,
    ),
    "Qwen3-235B-A22B": (
        llama("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536,
              **QWEN3_MOE),
        235_093_634_560, 22_190_763_520,
    ),
    "Mixtral-8x7B": (
        llama("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8,
              num_experts_per_tok=2, sliding_window=None, **SILU),
        46_702_792_704, 12_879_925_248,
    ),
    "OLMoE-1B-7B": (
        llama("olmoe", 2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8,
              **SILU),
        6_919_161_856, 1_282_017_280,
    ),
    "gpt-oss-20b": (
        llama("gpt_oss", 2880, 2880, 24, 64, 8, 201088, num_local_experts=32,
              layer_types=KINDS * 12, quantization_config={"quant_method": "mxfp4"}, **GPT_OSS),
        20_914_757_184, 4_187_440_704,
    ),
    "gpt-oss-120b": (
        llama("gpt_oss", 2880, 2880, 36, 64, 8, 201088, num_local_experts=128,
              layer_types=KINDS * 18, **GPT_OSS),
        116_829_156_672, 5_711_982_912,
    ),
    "GLM-4.5-Air": (
        llama("glm4_moe", 4096, 10944, 46, 96, 8, 151552, moe_intermediate_size=1408,
              n_routed_experts=128, first_k_dense_replace=1, use_qk_norm=False, **GLM),
        106_852_245_504, 13_424_123_904,
    ),
    "GLM-4.5": (
        llama("glm4_moe", 5120, 12288, 92, 96, 8, 151552, moe_intermediate_size=1536,
              n_routed_experts=160, first_k_dense_replace=3, use_qk_norm=True, **GLM),
        352_797_814_784, 33_632_251_904,
    ),
    "DeepSeek-V2-Lite": (
        llama("deepseek_v2", 2048, 10944, 27, 16, 16, 102400, moe_intermediate_size=1408,
              n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1,
              q_lora_rank=None, first_k_dense_replace=1, aux_loss_alpha=0.001, **LATENT),
        15_706_484_224, 2_661_150_208,
    ),
    "DeepSeek-V2": (
        llama("deepseek_v2", 5120, 12288, 60, 128, 128, 102400, moe_intermediate_size=1536,
              n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, n_group=8,
              q_lora_rank=1536, first_k_dense_replace=1, aux_loss_alpha=0.001, **LATENT),
        235_741_434_880, 21_375_800_320,
    ),
    "DeepSeek-V3": (
        llama("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048,
              n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8,
              q_lora_rank=1536, first_k_dense_replace=3, num_nextn_predict_layers=1,
              quantization_config=FP8, **LATENT),
        671_026_404_352, 37_552_282_624,
    ),
    "Kimi-K2": (
        llama("kimi_k2", 7168, 18432, 61, 64, 64, 163840, moe_intermediate_size=2048,
              n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8, n_group=1,
              q_lora_rank=1536, first_k_dense_replace=1, num_nextn_predict_layers=0,
              quantization_config=FP8, **LATENT),
        1_026_408_209_408, 32_861_477_888,
    ),
    "Moonlight-16B-A3B": (
        llama("deepseek_v3", 2048, 11264, 27, 16, 16, 163840, moe_intermediate_size=1408,
              n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1,
              q_lora_rank=None, first_k_dense_replace=1, num_nextn_predict_layers=0, **LATENT),
        15_960_108_544, 2_914_774_528,
    ),
    "DeepSeek-V3.2": (
        llama("deepseek_v32", 7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048,
              n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8,
              q_lora_rank=1536, first_k_dense_replace=3, num_nextn_predict_layers=1,
              index_n_heads=64, index_head_dim=128, index_topk=2048, quantization_config=FP8,
              **LATENT),
        671_877_929_216, 38_403_807_488,
    ),
    "GLM-5": (
        llama("glm_moe_dsa", 6144, 12288, 78, 64, 64, 154880, moe_intermediate_size=2048,
              n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=1,
              q_lora_rank=2048, first_k_dense_replace=3, num_nextn_predict_layers=1,
              index_n_heads=32, index_head_dim=128, index_topk=2048,
              **{**LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256}),
        743_911_199_232, 41_784_709_632,
    ),
    "Llama-4-Scout": (
        llama("llama4_text", 5120, 8192, 48, 40, 8, 202048, num_local_experts=16,
              interleave_moe_layer_step=1, use_qk_norm=True, **LLAMA4),
        107_769_861_120, 17_172_894_720,
    ),
    "Llama-4-Maverick": (
        llama("llama4_text", 5120, 8192, 48, 40, 8, 202048, num_local_experts=128,
              interleave_moe_layer_step=2, use_qk_norm=False, **LLAMA4),
        400_711_848_960, 17_184_691_200,
    ),
    "grok-1": (
        llama("grok-1", 6144, 32768, 64, 48, 8, 131072, num_experts=8, num_experts_per_tok=2,
              max_attn_value=30.0, tie_word_embeddings=True),
        315_684_820_992, 83_756_587_008,
    ),
}  # fmt: skip
"""Mixtures of experts: also the parameters that a token passes.  Totals of the text parts, without
layers that predict more than one token, as their classes in Transformers 5.23.0 count them (grok-1:
by hand from modeling_grok1.py; its card rounds to 314B)."""
