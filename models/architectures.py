"""The models that `export.py` writes: what each is, how large, and what it is fed."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from cases import (
    DYNAMO_STATIC,
    STATIC,
    Architecture,
    Case,
    Config,
    Input,
    Variant,
    floats,
    mask,
    tokens,
)
from networks import DecodeStep, MixtureOfExperts, Recommender, Recurrent, UNet

NO_LEGACY_DIFF: dict[Variant, str] = {
    ("legacy", "static"): "aten::diff, which transformers uses where no padding mask is given"
}
# The ids of these classes' special tokens lie beyond a small vocabulary.
NO_TEXT_ENDS: Config = {"bos_token_id": None, "eos_token_id": None}

# For training: so that tokens repeat, and the gradients of their rows add up.
SMALL_VOCABULARY: Config = {"vocab_size": 48}

ARCHITECTURES: dict[str, Architecture] = {}


def architecture(
    name: str, *, small: Config, full: Config, **options: Any
) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Register the decorated function, which turns a configuration into a Case, as a model."""

    def register(build: Callable[..., Case]) -> Callable[..., Case]:
        ARCHITECTURES[name] = Architecture(name, build, small, full, **options)
        return build

    return register


def text(network: hf.PreTrainedModel, *, padded: bool) -> dict[str, Input]:
    """Token ids, and where `padded` also the mask that says which of them count."""
    inputs = {"input_ids": tokens(network.config.vocab_size, "batch", "seq")}
    return inputs | ({"attention_mask": mask("batch", "seq")} if padded else {})


GPT2 = {"n_layer": 2, "n_head": 8, "n_embd": 48, "vocab_size": 512, "n_positions": 16}


@architecture("gpt2", small=GPT2, full={}, training=SMALL_VOCABULARY)
def gpt2(*, padded: bool = True, **config: Any) -> Case:
    """Fused QKV, learned positions, embedding and head tied, causal and padding mask."""
    network = hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False, **NO_TEXT_ENDS, **config))
    return Case(network, text(network, padded=padded))


@architecture("gpt2_fp16", small=GPT2, full={}, variants=DYNAMO_STATIC, dtype=torch.float16)
@architecture(
    "gpt2_vocab50257",
    small=GPT2 | {"n_embd": 16, "vocab_size": 50257},
    full={},
    variants=DYNAMO_STATIC,
)
def gpt2_unpadded(**config: Any) -> Case:
    """The same without a padding mask."""
    return gpt2(padded=False, **config)


LLAMA = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 48,
    "intermediate_size": 144,
    "vocab_size": 512,
}
TINY_LLAMA = {
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "vocab_size": 32000,
}


@architecture("llama", small=LLAMA, full=TINY_LLAMA, training=SMALL_VOCABULARY)
def llama(*, padded: bool = True, **config: Any) -> Case:
    """Grouped-query attention, rotary positions, RMSNorm, gated MLP, head apart from embedding."""
    network = hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False, **config))
    return Case(network, text(network, padded=padded))


@architecture(
    "llama_heads9",
    small=LLAMA | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54},
    full={
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    variants=STATIC,
    fails=NO_LEGACY_DIFF,
)
def llama_heads9(**config: Any) -> Case:
    """The 9 query and 3 key/value heads of SmolLM, embedding and head tied, no padding mask."""
    return llama(padded=False, tie_word_embeddings=True, **config)


@architecture("llama_decode", small=LLAMA, full=TINY_LLAMA)
def llama_decode(**config: Any) -> Case:
    """One step of generation: one token per sequence, past keys and values in, present ones out."""
    network = hf.LlamaForCausalLM(hf.LlamaConfig(**config))
    settings: Any = network.config
    layers = settings.num_hidden_layers
    past = floats("batch", settings.num_key_value_heads, "past", settings.head_dim)
    inputs = {"input_ids": tokens(settings.vocab_size, "batch", 1)}
    for layer in range(layers):
        inputs |= {f"past_key_{layer}": past, f"past_value_{layer}": past}

    def arrange(flat: Mapping[str, Any]) -> dict[str, Any]:
        pairs = [(flat[f"past_key_{i}"], flat[f"past_value_{i}"]) for i in range(layers)]
        return {"input_ids": flat["input_ids"], "past": pairs}

    return Case(DecodeStep(network), inputs, arrange)


@architecture(
    "mixtral",
    small=LLAMA | {"intermediate_size": 64, "num_local_experts": 4},
    full={"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8},
    training=SMALL_VOCABULARY,
)
def mixtral(**config: Any) -> Case:
    """A router that picks 2 of 4 experts per token, whose weights are gathered by token."""
    network = hf.MixtralForCausalLM(hf.MixtralConfig(use_cache=False, **config))
    network.config._experts_implementation = "batched_mm"
    return Case(network, text(network, padded=True))


@architecture(
    "falcon",
    small={"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 48, "vocab_size": 512},
    full={"num_hidden_layers": 4},  # of the 32 that Falcon-7B has
    training=SMALL_VOCABULARY,
)
def falcon(**config: Any) -> Case:
    """Attention and MLP in parallel on one norm; one key/value head in a fused QKV weight."""
    network = hf.FalconForCausalLM(hf.FalconConfig(use_cache=False, **NO_TEXT_ENDS, **config))
    return Case(network, text(network, padded=True))


@architecture(
    "gpt_neox",
    small={
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 512,
    },
    full={
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "hidden_size": 512,
        "intermediate_size": 2048,
    },
    variants=STATIC,
    fails=NO_LEGACY_DIFF,
    training=SMALL_VOCABULARY | {"padded": True},
)
def gpt_neox(*, padded: bool = False, **config: Any) -> Case:
    """Attention and MLP in parallel on two norms; QKV fused per head; partly rotary positions."""
    network = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(use_cache=False, **config))
    return Case(network, text(network, padded=padded))


BERT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_size": 48,
    "intermediate_size": 192,
    "vocab_size": 512,
    "max_position_embeddings": 16,
    "num_labels": 5,
}


@architecture("bert", small=BERT, full={}, training=SMALL_VOCABULARY)
def bert(**config: Any) -> Case:
    """An encoder with a padding mask, token types, a pooler and a classifier of odd width."""
    network = hf.BertForSequenceClassification(hf.BertConfig(**config))
    token_types = {"token_type_ids": tokens(network.config.type_vocab_size, "batch", "seq")}
    return Case(network, text(network, padded=True) | token_types)


@architecture("bert_encoder", small=BERT, full={})
def bert_encoder(**config: Any) -> Case:
    """BERT without a head: hidden states, and what the pooler makes of the first."""
    network = hf.BertModel(hf.BertConfig(**config))
    token_types = {"token_type_ids": tokens(network.config.type_vocab_size, "batch", "seq")}
    return Case(network, text(network, padded=True) | token_types)


@architecture(
    "t5",
    small={
        "attn_implementation": "eager",  # dynamo writes its default one with a wrong view
        "num_layers": 2,
        "num_heads": 8,
        "d_model": 48,
        "d_kv": 6,
        "d_ff": 96,
        "vocab_size": 512,
    },
    full={"attn_implementation": "eager"},
    training=SMALL_VOCABULARY,
)
def t5(**config: Any) -> Case:
    """Encoder and decoder with cross-attention and learned relative positions, two outputs."""
    network = hf.T5ForConditionalGeneration(hf.T5Config(use_cache=False, **config))
    target = {"decoder_input_ids": tokens(network.config.vocab_size, "batch", "target")}
    return Case(network, text(network, padded=True) | target)


def images(channels: int, size: int) -> dict[str, Input]:
    """A batch of square images."""
    return {"pixel_values": floats("batch", channels, size, size)}


@architecture(
    "vit",
    small={
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "hidden_size": 48,
        "intermediate_size": 192,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 10,
    },
    full={},
    training={},
    rate=0.003,
)
def vit(**config: Any) -> Case:
    """Patches by convolution, a class token joined to them: 17 positions."""
    network = hf.ViTForImageClassification(hf.ViTConfig(**config))
    return Case(network, images(3, config.get("image_size", 224)))


RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [32, 64, 96, 128],
    "depths": [2, 2, 2, 2],
    "num_labels": 10,
    "image_size": 64,
}


@architecture("resnet_fp16", small=RESNET, full={}, variants=DYNAMO_STATIC, dtype=torch.float16)
# At this rate no ReLU is about to switch on the way: at most others, moving weights by 1e-7 moves
# losses by 1e-4 and more.
@architecture(
    "resnet", small=RESNET, full={}, training={"hidden_sizes": [16, 32, 48, 64]}, rate=0.003
)
def resnet(image_size: int = 224, **config: Any) -> Case:
    """The bottleneck blocks of ResNet-50: strided convolutions, batch-norm, global pooling."""
    network = hf.ResNetForImageClassification(hf.ResNetConfig(**config))
    return Case(network, images(3, image_size))


@architecture(
    "mobilenet",
    small={"depth_multiplier": 0.125, "num_labels": 10, "image_size": 64},
    full={},
    variants=STATIC,
    training={},
    rate=0.003,
)
def mobilenet(**config: Any) -> Case:
    """Depthwise convolutions (one group per channel) between pointwise ones, uneven padding."""
    network = hf.MobileNetV1ForImageClassification(hf.MobileNetV1Config(**config))
    return Case(network, images(3, config.get("image_size", 224)))


@architecture(
    "unet",
    small={"widths": (16, 24, 32)},
    full={"widths": (64, 128, 256, 512, 1024)},
    training={},
    loss="mse",
    rate=0.003,
)
def unet(widths: tuple[int, ...]) -> Case:
    """GroupNorm, skip connections by Concat, upsampling, a time embedding added per channel."""
    inputs = {"sample": floats("batch", 3, 32, 32), "timestep": floats("batch")}
    return Case(UNet(3, widths), inputs)


@architecture(
    "dlrm",
    small={"rows": (1009, 503, 257, 129, 61), "width": 16},
    full={"rows": (1_000_003, 500_009, 100_003, 10_007, 1_009), "width": 64},
    training={"rows": (211, 101, 53, 31, 13)},
    loss="bce",
    rate=0.001,
)
def dlrm(rows: tuple[int, ...], width: int) -> Case:
    """Embedding tables of odd sizes, eight rows summed per lookup, pairwise dot products."""
    inputs = {"dense": floats("batch", 13)}
    inputs |= {f"indices_{i}": tokens(bound, "batch", 8) for i, bound in enumerate(rows)}

    def arrange(flat: Mapping[str, Any]) -> dict[str, Any]:
        return {"dense": flat["dense"], "indices": [flat[f"indices_{i}"] for i in range(len(rows))]}

    return Case(Recommender(13, rows, width), inputs, arrange)


@architecture(
    "moe",
    small={"rows": 48, "width": 32, "experts": 12, "hidden": 48, "capacity": 4},
    full={"rows": 32000, "width": 1024, "experts": 64, "hidden": 4096, "capacity": 4},
    variants=(),
    training={},
)
def moe(**config: Any) -> Case:
    """Experts as in GShard: tokens are dispatched and combined by products with one-hot tensors."""
    network = MixtureOfExperts(seq=16, classes=10, **config)
    return Case(network, {"input_ids": tokens(config["rows"], "batch", 16)})


@architecture(
    "lstm",
    small={"rows": 48, "width": 24},
    full={"rows": 32000, "width": 1024},
    variants=(),
    training={},
    rate=0.1,
)
def lstm(**config: Any) -> Case:
    """Recurrent layers: an LSTM both ways, one forwards, a GRU whose last state counts."""
    network = Recurrent(classes=10, **config)
    return Case(network, {"input_ids": tokens(config["rows"], "batch", "seq")})
