"""examples/gpt: the derivative of the whole model, training that goes on to the same bits, and samples."""

import importlib
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.gpt import __main__ as command
from examples.gpt import cpu
from examples.gpt.__main__ import on_host
from examples.gpt.data import END, Text, batch_of, decode, encode
from examples.gpt.model import GPT, Batch, Config
from examples.gpt.parameters import AdamW
from flashkit import KVCache

SMALL = Config(vocabulary=20, context=12, layers=2, heads=2, width=16)
TEXT = Text.of_documents([f"document {i}: words, words and {i * i} more of the words." for i in range(40)])


def random_model(config=SMALL) -> GPT:
    """Biases and scales are random too, as after training."""
    model = GPT(config, cpu, "float64")
    rng = np.random.default_rng(1)
    state = {name: rng.normal(0, 0.3, shape) for name, shape in config.shapes().items()}
    model.parameters.load(state)
    return model


def random_batch(lengths=(12, 12)) -> Batch:
    ids, targets = np.random.default_rng(2).integers(0, SMALL.vocabulary, (2, sum(lengths)))
    return Batch(ids, targets, np.append(0, np.cumsum(lengths)))


def of_torch(model: GPT, batch: Batch):
    """Loss and gradients of the same model in PyTorch, one sequence after the other."""
    torch, peer = pytest.importorskip("torch"), importlib.import_module("gpt")
    state = {name: on_host(x) for name, x in model.parameters.state().items()}
    other = peer.TorchGPT(model.config, state, "naive", "cpu", torch.float64)
    count, total = (batch.targets >= 0).sum(), 0
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids, targets = (torch.from_numpy(x[None, begin:end]) for x in (batch.ids, batch.targets))
        total = total + other(ids, targets) * int((targets >= 0).sum()) / int(count)
    total.backward()
    gradients = dict(other.named_parameters())
    return float(total.detach()), {n: gradients[n.replace(".", "_")].grad.numpy() for n in model.parameters.shapes}


def test_gradients_are_those_of_pytorch():
    model, batch = random_model(), random_batch((5, 12, 1, 9))
    batch.targets[[3, 7, 11]] = -1
    loss, gradients = of_torch(model, batch)
    assert abs(float(model.loss(batch)) - loss) < 1e-10
    assert abs(float(model.add_gradients(batch, 0.5)) - loss) < 1e-10
    assert abs(float(model.add_gradients(batch, 0.5)) - loss) < 1e-10  # gradients are sums
    for name, expected in gradients.items():
        error = np.abs(on_host(model.parameters.gradient(name)) - expected).max()
        assert error < 1e-10 * max(1, np.abs(expected).max()), name


def test_adamw_is_pytorchs():
    torch = pytest.importorskip("torch")
    optimizer, model = AdamW(steps=10, rate=0.1, warmup=2, clip=0.5), random_model(Config(20, 12, 1, 2, 64))
    names = list(model.parameters.shapes)
    peers = {n: torch.nn.Parameter(torch.from_numpy(on_host(model.parameters[n]).copy())) for n in names}
    groups = [
        {"params": [x for x in peers.values() if x.dim() == axes], "weight_decay": decay}
        for axes, decay in ((2, 0.1), (1, 0.0))
    ]
    peer, rng = torch.optim.AdamW(groups, betas=optimizer.betas), np.random.default_rng(0)
    for step in range(4):
        for group in peer.param_groups:
            group["lr"] = optimizer.rate_at(step)
        for name, x in peers.items():
            gradient = rng.normal(0, 1, x.shape)
            x.grad = torch.from_numpy(gradient)
            model.parameters.gradient(name)[...] = gradient
        torch.nn.utils.clip_grad_norm_(list(peers.values()), optimizer.clip)
        peer.step()
        optimizer.update(model.parameters, step, cpu)
        for name, x in peers.items():
            np.testing.assert_allclose(on_host(model.parameters[name]), x.detach().numpy(), rtol=1e-9, atol=1e-9)
            assert not on_host(model.parameters.gradient(name)).any()


def test_the_rate_rises_and_falls_to_a_tenth():
    rates = [AdamW(steps=100, rate=1.0, warmup=10).rate_at(i) for i in range(101)]
    assert rates[0] == 0.1 and rates[10] == max(rates) == 1.0 and abs(rates[100] - 0.1) < 1e-12
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_one_token_after_the_other_has_the_logits_of_all_at_once():
    model = random_model()
    ids = np.random.default_rng(0).integers(0, SMALL.vocabulary, 7)
    cache = KVCache(1, 2, 8, pages=1, page=64, layers=2, like=model.parameters["ln_f.weight"])
    found = [model.next_logits(part, cache) for part in (ids[:3], *ids[3:, None])]
    losses = [model.loss(Batch(ids[:n], np.where(np.arange(n) == n - 1, 0, -1), np.array([0, n]))) for n in range(3, 8)]
    expected = [np.log(np.exp(x.astype(float)).sum()) - x[0] for x in found]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_packed_documents_do_not_see_each_other():
    tokens = np.array([1, 2, 3, END, 4, 5, END, 6, 7, 8])
    batch = batch_of(tokens, np.array([0]), 9, packed=True)
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 9] and batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert batch.targets.tolist() == tokens[1:].tolist()
    assert batch_of(tokens, np.array([0, 1]), 5, packed=False).cu_seqlens.tolist() == [0, 5, 10]


def test_text_is_characters():
    assert decode(encode("def f(x): ~\n")) == "def f(x): ~\n" and len(encode("ä")) == 0


SIZES = {"layers": 1, "heads": 2, "width": 32, "context": 32, "sequences": 4, "every": 15, "sample": 20, "rate": 0.01}
TRAIN = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture
def documents(monkeypatch):
    texts = [f"class Number{i}: the number {i}, as {i} times one." * 3 for i in range(60)]
    monkeypatch.setattr(command, "standard_library", lambda: texts)


def trained(folder: Path, steps: int, *more: str) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    file = folder / "model.safetensors"
    assert command.main([*TRAIN, "--steps", str(steps), "--file", str(file), *more]) == 0
    return load_file(file)


def test_thirty_steps_learn_and_a_resumed_run_has_the_same_bits(tmp_path, documents, capsys, monkeypatch):
    whole = trained(tmp_path / "whole", 30, "--packed", "--accumulate", "2")
    first, last = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "test" in line)
    assert last < first < 4  # log 97 is 4.6
    update = AdamW.update

    def interrupted(self, p, step, ops):
        if step == 11:
            signal.raise_signal(signal.SIGINT)
        update(self, p, step, ops)

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "update", interrupted)
        file = tmp_path / "parts" / "model.safetensors"
        arguments = [*TRAIN, "--steps", "30", "--file", str(file), "--packed", "--accumulate", "2"]
        assert command.main(arguments) == 130
    assert "12 steps; the same command goes on" in capsys.readouterr().out
    parts = trained(tmp_path / "parts", 30, "--packed", "--accumulate", "2")
    assert "has 12 steps" in capsys.readouterr().out
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(array, parts[name], err_msg=name)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    command.save(tmp_path / "a.safetensors", GPT(SMALL, cpu), 3)
    assert command.load(tmp_path / "a.safetensors", GPT(SMALL, cpu)) == 3
    with pytest.raises(ValueError, match=r"wte.weight: expected shape \(20, 32\), got \(20, 16\)"):
        command.load(tmp_path / "a.safetensors", GPT(Config(20, 12, 2, 2, 32), cpu))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dtype bfloat16", "needs --device cuda"),
        ("--width 130", "expected a multiple of 16, four for each head, got 130"),
        ("--device tpu", "invalid choice: 'tpu'"),
    ],
)
def test_bad_arguments(arguments, message, documents, capsys):
    with pytest.raises((SystemExit, ValueError)) as raised:
        command.main(arguments.split())
    assert message in capsys.readouterr().err + str(raised.value)


def test_a_device_without_cupy_is_an_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "examples.gpt.gpu", raising=False)
    with pytest.raises(SystemExit):
        command.main(["--device", "cuda"])
    assert 'pip install "cupy-cuda13x[ctk]"' in capsys.readouterr().err
