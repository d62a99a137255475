"""Text to tokens and back: the byte-level BPE tokenizer and the chat template (ChatML) of SmolLM2."""

from __future__ import annotations

from collections.abc import Sequence

from .checkpoint import Checkpoint, ModelNotFoundError

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONTROL = 3  # the type of a token that is no text, such as <|im_end|>


class Tokenizer:
    """The tokenizer that a GGUF file describes. Raises ModelNotFoundError without the package tokenizers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            from tokenizers import AddedToken, decoders, models, pre_tokenizers
            from tokenizers import Tokenizer as Fast
        except ImportError as error:
            raise ModelNotFoundError(f"the package tokenizers ({error})") from error
        known = checkpoint.field("tokenizer.ggml.pre")
        if known != "smollm":
            raise ValueError(f"the tokenizer splits text as {known!r}; 'smollm' is known here")
        words = checkpoint.field("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in checkpoint.field("tokenizer.ggml.merges")]
        self._fast = Fast(models.BPE({word: i for i, word in enumerate(words)}, merges))
        self._fast.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._fast.decoder = decoders.ByteLevel()
        types = checkpoint.field("tokenizer.ggml.token_type")
        special = [word for word, kind in zip(words, types, strict=True) if kind == CONTROL]
        self._fast.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
        self.end: int = checkpoint.field("tokenizer.ggml.eos_token_id")

    def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._fast.decode(list(tokens), skip_special_tokens=True))

    def chat(self, question: str, system: str = SYSTEM) -> list[int]:
        """The tokens of a question to the assistant, up to where its answer begins."""
        turns = (("system", system), ("user", question))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.encode(f"{text}<|im_start|>assistant\n")
