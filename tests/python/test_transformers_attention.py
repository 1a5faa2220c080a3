"""attn_implementation="dmattn": masks against Transformers' own, models against their eager attention."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import transformers
from flash_dmattn import KeyIntervals
from flash_dmattn.integrations import _masks
from flash_dmattn.integrations._masks import intervals_in, is_row_intervals
from flash_dmattn.integrations.attention_interface import dmattn_attention_forward, dmattn_mask
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache, masking_utils

VOCABULARY = 120
BATCH, LENGTH = 2, 23


def test_is_registered() -> None:
    assert AttentionInterface()["dmattn"] is dmattn_attention_forward
    assert AttentionMaskInterface()["dmattn"] is dmattn_mask


# ---- Masks


def config_of(implementation: str, **settings: object) -> transformers.PreTrainedConfig:
    settings = {"num_hidden_layers": 1, "attn_implementation": implementation} | settings
    return transformers.LlamaConfig(**settings)


def filled(cache: transformers.Cache | None, tokens: int) -> transformers.Cache | None:
    if cache is not None and tokens:
        states = torch.zeros(BATCH, 1, tokens, 4)
        cache.update(states, states, 0)
    return cache


def dense(mask: Tensor, rows: int) -> Tensor:
    return intervals_in(mask).dense_mask(rows) if is_row_intervals(mask) else mask


def padding(left: int = 0, right: int = 0, length: int = LENGTH) -> Tensor:
    """(B, length), the second sequence is padded."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, :left] = 0
    mask[1, length - right :] = 0
    return mask


PACKED = torch.cat([torch.arange(9), torch.arange(1), torch.arange(13)])[None]
BLOCKS = torch.tensor([[-1] * 4 + [0] * 5 + [-1] * 2 + [1] * 8 + [-1] * 4]).expand(BATCH, -1)
CREATORS = {
    "causal": (masking_utils.create_causal_mask, {}),
    "bidirectional": (masking_utils.create_bidirectional_mask, {}),
    "window": (masking_utils.create_sliding_window_causal_mask, {"sliding_window": 5}),
    "window_wide": (masking_utils.create_sliding_window_causal_mask, {"sliding_window": 100}),
    "window_bidirectional": (masking_utils.create_bidirectional_sliding_window_mask, {"sliding_window": 5}),
    "chunked": (masking_utils.create_chunked_causal_mask, {"attention_chunk_size": 6}),
}
GIVEN = {
    "plain": {},
    "left": {"attention_mask": padding(left=6)},
    "right": {"attention_mask": padding(right=4)},
    "all_ones": {"attention_mask": padding()},
    "packed": {"position_ids": PACKED},
    "blocks": {"block_sequence_ids": BLOCKS},
    "or_mask": {"or_mask_function": lambda batch, head, row, key: key < 3},
    "and_mask": {"and_mask_function": lambda batch, head, row, key: key % 3 != 1},
    "holes": {"and_mask_function": lambda batch, head, row, key: (row + key) % 3 != 1},
}


def both_masks(creator: str, given: dict, cache: str | None = None, rows: int = LENGTH, before: int = 0) -> list:
    """The mask that Transformers makes for "dmattn" and the one it makes for "sdpa"."""
    create, settings = CREATORS[creator]
    masks = []
    for implementation, arguments in (("dmattn", {}), ("sdpa", {"allow_is_causal_skip": False})):
        config = config_of(implementation, **settings)
        caches = {
            None: lambda: None,
            "dynamic": lambda config=config: DynamicCache(config=config),
            "static": lambda config=config: StaticCache(config=config, max_cache_len=40),
        }
        if "bidirectional" in creator:
            arguments = {"allow_is_bidirectional_skip": False} if arguments else {}
        masks.append(
            create(
                config=config,
                inputs_embeds=torch.zeros(BATCH, rows, 4),
                past_key_values=filled(caches[cache](), before),
                **({"attention_mask": None} | given | arguments),
            )
        )
    return masks


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("creator", CREATORS)
def test_masks_say_the_same(creator: str, given: str) -> None:
    if given in ("packed", "blocks") and "bidirectional" in creator:
        return  # these take neither
    if given == "blocks" and creator == "chunked":
        return
    ours, theirs = both_masks(creator, GIVEN[given])
    if ours is None:
        assert given in ("plain", "all_ones") and creator in ("causal", "bidirectional", "window_wide")
        return
    assert torch.equal(dense(ours, LENGTH).expand(theirs.shape), theirs)
    assert is_row_intervals(ours) == (given != "holes"), "a mask is dense only where it must be"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("before", "rows"), [(0, 9), (4, 9), (11, 1), (3, 1), (30, 2)])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("creator", ["causal", "window", "window_wide"])
def test_masks_with_a_cache_say_the_same(creator: str, padded: bool, before: int, rows: int, cache: str) -> None:
    given = {"attention_mask": padding(left=2, length=before + rows)} if padded else {}
    ours, theirs = both_masks(creator, given, cache, rows, before)
    if ours is None:
        assert cache == "dynamic" and not padded and (before == 0 or rows == 1) and theirs[..., -1, :].all()
        return
    assert is_row_intervals(ours)
    assert torch.equal(dense(ours, rows).expand(theirs.shape), theirs)


def test_masks_are_made_without_looking_at_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns that are understood never become a 4-D mask."""

    def refuse(**arguments: object) -> None:
        raise AssertionError("a 4-D mask was made")

    expected = [both_masks(creator, GIVEN["packed"])[1] for creator in ("causal", "window")]
    monkeypatch.setattr(masking_utils, "sdpa_mask", refuse)
    config = config_of("dmattn", sliding_window=5)
    arguments = {"config": config, "inputs_embeds": torch.zeros(BATCH, LENGTH, 4), "attention_mask": None}
    arguments |= {"past_key_values": None, "position_ids": PACKED}
    for creator, mask in zip(("causal", "window"), expected, strict=True):
        ours = CREATORS[creator][0](**arguments)
        assert ours.shape == (BATCH, 1, 2, LENGTH)
        assert torch.equal(dense(ours, LENGTH), mask)


def sliding_window_overlay(sliding_window: int) -> Callable:
    """Another one than Transformers', with the same names."""

    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
        return kv_idx > q_idx - 2 * sliding_window

    return inner_mask


def test_closures_of_others_are_not_guessed_at() -> None:
    """A function that only looks like one of Transformers' is evaluated."""
    for mask_function in (sliding_window_overlay(3), lambda batch, head, row, key: key <= row + 1):
        sizes = {"batch_size": 1, "q_length": 9, "kv_length": 9, "mask_function": mask_function}
        expected = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
        assert torch.equal(dense(dmattn_mask(**sizes), 9), expected)


def test_positions_that_are_not_of_documents_are_evaluated() -> None:
    position_ids = torch.arange(9)[None] // 2
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        causal = masking_utils.causal_mask_function
        remapped = masking_utils.remap_positions_for_packed_sequence(causal, position_ids)
    else:  # before 5.18

        def remapped(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return position_ids[batch, key] <= position_ids[batch, row]

    sizes = {"batch_size": 1, "q_length": 9, "kv_length": 9, "mask_function": remapped}
    expected = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
    assert torch.equal(dense(dmattn_mask(**sizes), 9), expected)


# ---- Attention


def heads_first(rows: int = 7, keys: int = 7, head_dim: int = 8, value_dim: int = 8) -> list[Tensor]:
    """query (2, 4, rows, D), key and value (2, 2, keys, D)."""
    return [
        torch.randn(2, heads, length, dim, dtype=torch.float64)
        for heads, length, dim in ((4, rows, head_dim), (2, keys, head_dim), (2, keys, value_dim))
    ]


def naive(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, bias: Tensor | None = None, **options: object
) -> Tensor:
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.mT * options.get("scaling", query.shape[-1] ** -0.5)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = scores if bias is None else scores + bias
    scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    if "s_aux" in options:
        sinks = options["s_aux"][:, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ value).transpose(1, 2)


def attend(*tensors: Tensor, mask: Tensor | None = None, module: nn.Module | None = None, **options: object) -> Tensor:
    out, weights = dmattn_attention_forward(module or nn.Module(), *tensors, mask, **options)
    assert weights is None
    return out


CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()
RANDOM = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)).lt(0.5) | torch.eye(7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({}, CAUSAL),
        ({"is_causal": False}, None),
        ({"sliding_window": 3}, CAUSAL & ~CAUSAL.tril(-3)),
        ({"sliding_window": 9}, CAUSAL),
        ({"softcap": 0.7}, CAUSAL),
        ({"scaling": 0.2}, CAUSAL),
        ({"s_aux": torch.tensor([0.0, -3.0, 1.0, 5.0])}, CAUSAL),
        ({"mask": RANDOM}, RANDOM),
        ({"mask": RANDOM, "is_causal": True, "s_aux": torch.ones(4)}, RANDOM),
        ({"mask": RANDOM[:, :, :1]}, RANDOM[:, :, :1]),
    ],
    ids=["default", "all", "window", "wide_window", "softcap", "scaling", "sinks", "mask", "mask_sinks", "row_mask"],
)
def test_options(options: dict, visible: Tensor | None) -> None:
    tensors = heads_first()
    numbers = {name: options[name] for name in ("softcap", "scaling", "s_aux") if name in options}
    numbers = {name: value.double() if isinstance(value, Tensor) else value for name, value in numbers.items()}
    torch.testing.assert_close(attend(*tensors, **options), naive(*tensors, visible, **numbers))


@pytest.mark.parametrize("value_dim", [4, 12])
def test_values_of_another_head_dim(value_dim: int) -> None:
    tensors = heads_first(value_dim=value_dim)
    torch.testing.assert_close(attend(*tensors), naive(*tensors, CAUSAL))


def test_additive_masks() -> None:
    tensors = heads_first()
    bias = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    for hidden in (torch.finfo(torch.float64).min, -torch.inf):
        mask = bias.masked_fill(~RANDOM, hidden)
        torch.testing.assert_close(attend(*tensors, mask=mask), naive(*tensors, RANDOM, bias))
        both = attend(*tensors, mask=mask, position_bias=bias)
        torch.testing.assert_close(both, naive(*tensors, RANDOM, 2 * bias))


@pytest.mark.parametrize("mask", [None, RANDOM], ids=["causal", "mask"])
def test_position_bias_and_sinks_have_gradients(mask: Tensor | None) -> None:
    leaves = [tensor.requires_grad_() for tensor in heads_first()]
    position_bias = torch.randn(1, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves += [position_bias, sinks]
    visible = CAUSAL if mask is None else mask
    out = attend(*leaves[:3], mask=mask, position_bias=position_bias, s_aux=sinks)
    expected = naive(*leaves[:3], visible, position_bias, s_aux=sinks)
    cotangent = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad(out, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_without_mask_more_keys_than_rows_are_not_filled_yet() -> None:
    query, key, value = heads_first(keys=12)
    filled = key[:, :, :7], value[:, :, :7]
    torch.testing.assert_close(attend(query, key, value), naive(query, *filled, CAUSAL))
    bias = torch.randn(2, 4, 7, 12, dtype=torch.float64)
    got = attend(query, key, value, position_bias=bias)
    torch.testing.assert_close(got, naive(query, *filled, CAUSAL, bias[..., :7]))
    one = query[:, :, :1]
    torch.testing.assert_close(attend(one, key, value), naive(one, key, value, None))


def test_float32_is_cast_to_the_models_dtype() -> None:
    module = nn.Module()
    module.projection = nn.Linear(2, 2, dtype=torch.bfloat16)
    tensors = [tensor.float() for tensor in heads_first()]
    out = attend(*tensors, module=module)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(*(tensor.bfloat16() for tensor in tensors)))


def test_position_bias_of_another_dtype() -> None:
    tensors, bias = heads_first(), torch.randn(1, 4, 7, 7).bfloat16()
    got = attend(*(tensor.float() for tensor in tensors), position_bias=bias)
    torch.testing.assert_close(got, naive(*tensors, CAUSAL, bias.double()).float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.5}, "dropout of attention probabilities is not supported"),
        ({"head_mask": torch.ones(4)}, "head_mask is not supported"),
        ({"mask": torch.ones(2, 7)}, "attention_mask must be bool or floating point with 4 dimensions"),
        ({"mask": torch.ones(2, 1, 1, 7).int()}, "got attention_mask int32 (2, 1, 1, 7)"),
        ({"softcap": -1.0}, "softcap must"),
    ],
    ids=["dropout", "head_mask", "mask_rank", "mask_dtype", "softcap"],
)
def test_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(*heads_first(), **options)


# ---- Models


def tiny(name: str) -> transformers.PreTrainedModel:
    """A model with random weights, two or three layers and eager attention."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    kind, config = {
        "llama": (transformers.LlamaForCausalLM, lambda: transformers.LlamaConfig(**sizes)),
        "qwen3": (transformers.Qwen3ForCausalLM, lambda: transformers.Qwen3Config(**sizes)),
        "mistral": (transformers.MistralForCausalLM, lambda: transformers.MistralConfig(**sizes, sliding_window=7)),
        "gemma2": (
            transformers.Gemma2ForCausalLM,
            lambda: transformers.Gemma2Config(
                **sizes, sliding_window=7, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
            ),
        ),
        "gpt_oss": (
            transformers.GptOssForCausalLM,
            lambda: transformers.GptOssConfig(**sizes, sliding_window=7, num_local_experts=2, num_experts_per_tok=1),
        ),
        "t5": (
            transformers.T5ForConditionalGeneration,
            lambda: transformers.T5Config(
                vocab_size=VOCABULARY,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                attn_implementation="eager",
            ),
        ),
    }[name]
    torch.manual_seed(0)
    model = kind(config())
    for parameter in model.parameters():
        if parameter.dim() > 1:  # far enough from 0 that attention matters
            nn.init.normal_(parameter, std=0.3)
    if name == "gpt_oss":
        for layer in model.model.layers:
            nn.init.normal_(layer.self_attn.sinks)
    return model


def pair(name: str) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    """The same model with "dmattn" and with its eager attention."""
    eager = tiny(name)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("dmattn")
    assert (ours.config._attn_implementation, eager.config._attn_implementation) == ("dmattn", "eager")
    return ours, eager


DECODERS = ["llama", "qwen3", "mistral", "gemma2", "gpt_oss"]


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def assert_equal_results(
    ours: nn.Module, eager: nn.Module, inputs: dict[str, Tensor], real: Tensor | None = None
) -> None:
    """Logits at real tokens, and the gradients of a loss over them."""
    got, expected = (model(**inputs).logits for model in (ours, eager))
    real = torch.ones(got.shape[:2], dtype=torch.bool) if real is None else real
    torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(got[real])
    for model, logits in ((ours, got), (eager, expected)):
        model.zero_grad()
        (logits[real] * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in eager.named_parameters()}
    for name, parameter in ours.named_parameters():
        if gradients[name] is not None:
            largest = float(gradients[name].abs().max())
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4 * max(largest, 1.0))


@pytest.mark.parametrize("given", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_equal_eager(name: str, given: str) -> None:
    inputs = {"input_ids": tokens(), "use_cache": False} | GIVEN[given]
    if given == "packed":
        inputs["position_ids"] = inputs["position_ids"].expand(BATCH, -1)
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    assert_equal_results(*pair(name), inputs, real)


@pytest.mark.parametrize("how", ["dynamic", "static", "beams"])
@pytest.mark.parametrize("name", DECODERS)
def test_generates_what_eager_generates(name: str, how: str) -> None:
    settings = {"dynamic": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 3}}[how]
    prompt = {"input_ids": tokens(12), "attention_mask": padding(left=3, length=12)}
    settings |= {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False, "disable_compile": True}
    ours, eager = pair(name)
    assert torch.equal(ours.generate(**prompt, **settings), eager.generate(**prompt, **settings))


def test_chunked_prefill_equals_one_pass() -> None:
    for name in ("llama", "gemma2"):
        ours, eager = pair(name)
        text, cache = tokens(), DynamicCache(config=ours.config)
        with torch.no_grad():
            parts = [ours(part, past_key_values=cache).logits for part in text.split([9, 5, 1, 8], dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), eager(text).logits, rtol=1e-4, atol=1e-4)


def test_encoder_and_decoder_with_position_bias() -> None:
    ours, eager = pair("t5")
    inputs = {"input_ids": tokens(), "attention_mask": padding(right=5), "decoder_input_ids": tokens(9)}
    assert_equal_results(ours, eager, inputs)
    prompt = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(**prompt, **settings), eager.generate(**prompt, **settings))


def test_custom_masks_of_users() -> None:
    """4-D masks that are given to a model: bool, or added to the scores, which is all that eager attention takes."""
    ours, eager = pair("llama")
    text = tokens(7)
    additive = torch.zeros(RANDOM.shape).masked_fill(~RANDOM, torch.finfo(torch.float32).min)
    inputs = {"input_ids": text, "attention_mask": additive, "use_cache": False}
    assert_equal_results(ours, eager, inputs)
    torch.testing.assert_close(ours(text, attention_mask=RANDOM).logits, eager(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_masks_are_prepared_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    made, before = [], len(_masks._prepared)
    prepare = _masks.prepare_mask
    monkeypatch.setattr(_masks, "prepare_mask", lambda mask, *args: made.append(mask) or prepare(mask, *args))
    ours, _ = pair("llama")
    ours(tokens(), attention_mask=padding(left=4))
    assert len(made) == 1 and isinstance(made[0], KeyIntervals)
    assert len(_masks._prepared) == before  # and nothing is left of it


def test_attention_dropout_in_training_is_refused() -> None:
    config = tiny("llama").config
    config.attention_dropout = 0.1
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="dmattn")
    with pytest.raises(ValueError, match="dropout of attention probabilities is not supported"):
        model.train()(tokens())
    model.eval()(tokens())


def test_compiled_model_equals_eager() -> None:
    ours, eager = pair("llama")
    text, mask = tokens(), padding(left=4)
    for model in (ours, eager):
        del model.model.layers[1:]
        model.config.num_hidden_layers = 1
    got = torch.compile(ours, backend="aot_eager", dynamic=True)(text, attention_mask=mask, use_cache=False).logits
    expected = eager(text, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


def test_additive_masks_of_rows_without_keys_train_as_eager() -> None:
    """A float mask of -1e9, as users make them of left padding: rows of padding see every key at the same score."""
    torch.manual_seed(0)
    tokens, causal = torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    visible = causal & padding(left=6).bool()[:, None, None, :]
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(~visible, -1e9)
    eager = tiny("llama").train()
    ours = copy.deepcopy(eager)
    for model, implementation in ((eager, "eager"), (ours, "dmattn")):
        model.set_attn_implementation(implementation)
        model(tokens, attention_mask=mask).logits.square().mean().backward()
    for (name, expected), parameter in zip(eager.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=name)
