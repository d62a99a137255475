"""The options of attention(), one row each: type, default, kind, meaning, and its names in other libraries.

Everything that lists options derives the list from this table: signatures and docstrings (`documented`), the keys of
cached plans (`Role`), the schema and the batching rule of PyTorch's operator, the static arguments in JAX, the blocks
of Dask, what transformers passes, the planned steps of a cache, the flags of `flashkit explain`, the kernels that a
wheel carries, and "did you mean".
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, cast, get_args

from .errors import shown

Layout = Literal["bhnd", "bnhd"]
Precision = Literal["highest", "tf32", "fp8"]


class Role(Enum):
    """What a cached plan makes of an option."""

    CONSTANT = "a number, flag or name: the plan is for its value"
    POSITIONS = "where rows see keys, by position: a plan is for a number, and for no array"
    PAIRS = "an array: the plan is for its layout, and each call passes its own"
    LENGTHS = "integers, one for each batch entry: a plan serves all values"
    OFFSETS = "where packed sequences begin: a plan is for their contents on the host, and serves all on a device"
    IDENTITY = "an immutable object: the plan is for this one"
    PER_CALL = "whatever it is, each call is planned"


class Option(NamedTuple):
    """A row of the table."""

    meaning: str  # the entry in the docstring of `attention`
    role: Role = Role.CONSTANT
    default: Any = None
    theirs: tuple[str, ...] = ()  # its names in PyTorch, JAX, FlashAttention, xFormers, cuDNN and transformers
    # Of an array. "entries": integers, one for each batch entry. "heads": (Hq,), or (B, Hq). "pairs": what broadcasts
    # to (..., Hq, Nq, Nk). "memory": integers that say where sequences lie in q, k and v. Integers may be on the host;
    # other arrays are of the library of q.
    axes: Literal["", "entries", "heads", "pairs", "memory"] = ""
    counts: Literal["", "queries", "keys"] = ""  # what of each batch entry it is the number of
    hides: bool = False  # whether it is a number, flag or name that hides keys by their positions
    usual: Any = None  # a usual value, of kernels that a wheel carries, and of benchmarks
    flag: tuple[str, str] | None = None  # name and help on the command line

    @property
    def by_position(self) -> bool:
        """Whether its effect on a pair depends on the positions of query and key."""
        return self.hides or self.role is not Role.CONSTANT

    @property
    def is_integers(self) -> bool:
        """Whether it is an array of integers."""
        return self.axes in ("entries", "memory")


class Options(TypedDict, total=False):
    """The keyword arguments that `attention`, `attention_vjp`, `plan`, `explain` and `weights` share."""

    scale: Annotated[float | None, Option(
        "Factor on q k^T; 1 / sqrt(D) by default.", theirs=("softmax_scale", "sm_scale", "scaling"),
    )]  # fmt: skip
    causal: Annotated[bool, Option(
        "Key j is visible to query i iff j <= i + q_offset.", default=False, theirs=("is_causal",),
        hides=True, flag=("--causal", "Keys up to the query's position."),
    )]  # fmt: skip
    q_offset: Annotated[Any, Option(
        "Position of the first query on the key axis: an integer, or one for each batch entry. By default the number "
        "of keys less that of queries, of each sequence, so that the last query sees every key. 0 is the top-left "
        "alignment of PyTorch and ONNX, for batches that are padded on the right. Masks and scores by position "
        "need it where a length other than 0 is less than Nq, and where lengths are on a device and Nq is above 1.",
        Role.POSITIONS, axes="entries", flag=("--q-offset", "Position of the first query."),
    )]  # fmt: skip
    window: Annotated[tuple[int | None, int | None] | None, Option(
        "(left, right): key j is visible to query i iff i + q_offset - left <= j <= i + q_offset + right. None is no "
        "bound.",
        theirs=("window_size", "local_window_size", "sliding_window"), hides=True, usual=(8, 0),
        flag=("--window", "left,right; none for no bound: 512,0"),
    )]  # fmt: skip
    softcap: Annotated[float | None, Option(
        "Scores become softcap * tanh(score / softcap).",
        theirs=("soft_cap", "logits_soft_cap", "attn_logits_soft_cap"), usual=30.0,
        flag=("--softcap", "Cap scores by tanh."),
    )]  # fmt: skip
    alibi_slopes: Annotated[Any, Option(
        "(Hq,) or (B, Hq): slope * |i + q_offset - j| is subtracted from the score.",
        Role.PAIRS, theirs=("alibi", "slopes"), axes="heads", flag=("--alibi", "ALiBi slopes."),
    )]  # fmt: skip
    bias: Annotated[Any, Option(
        "Floating, broadcasts to (..., Hq, Nq, Nk), added after softcap. -inf masks a pair.",
        Role.PAIRS, theirs=("attn_bias",), axes="pairs", flag=("--bias", "A bias for every pair."),
    )]  # fmt: skip
    mask: Annotated[Any, Option(
        "Bool, broadcasts to (..., Hq, Nq, Nk), True = attend. A floating mask is added like a bias.",
        Role.PAIRS, theirs=("attn_mask", "attention_mask"), axes="pairs",
        flag=("--mask", "A Boolean mask for every pair."),
    )]  # fmt: skip
    block_mask: Annotated[Any, Option("A flashkit.BlockMask for Nq queries and Nk keys.", Role.IDENTITY)]
    score_mod: Annotated[Callable[..., Any] | Any, Option(
        "A function (s, b, h, q, k) -> s, or a flashkit.mods.Mod; see flashkit.mods.", Role.PER_CALL,
    )]  # fmt: skip
    mask_mod: Annotated[Callable[..., Any] | Any, Option(
        "A function (b, h, q, k) -> bool, or a flashkit.mods.Mod.", Role.PER_CALL,
    )]  # fmt: skip
    kv_lengths: Annotated[Any, Option(
        "(B,) integers: keys at or past the length do not exist, and the memory there never affects the result.",
        Role.LENGTHS, axes="entries", counts="keys",
        theirs=("cache_seqlens", "seqused_k", "kv_seqlens", "key_value_seq_lengths", "seqlens_k"),
    )]  # fmt: skip
    q_lengths: Annotated[Any, Option(
        "(B,) integers: queries at or past the length see no key, so their rows are 0. The default q_offset is then "
        "kv_lengths - q_lengths: batches that are padded on the right are right with causal=True.",
        Role.PER_CALL, axes="entries", counts="queries", theirs=("seqused_q", "query_seq_lengths", "seqlens_q"),
    )]  # fmt: skip
    cu_seqlens: Annotated[Any, Option(
        "Sequences of any length that follow each other, without padding: q (T, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, "
        "Dv). Integers (sequences + 1,), from 0 to at most T, where each sequence begins and the last one ends; a pair "
        "(of q, of k) where these differ. Batch entry b of masks, scores and offsets is sequence b, and positions "
        "count within it. lse is (Hq, T). Rows past the last offset are 0. Integers on a GPU are not read by the host.",
        Role.OFFSETS, axes="memory",
    )]  # fmt: skip
    page_table: Annotated[Any, Option(
        "Keys and values in pages: k (pages, page, Hkv, D), v (pages, page, Hkv, Dv), any strides. Integers (B, pages "
        "of a sequence): the page that holds keys i * page to (i + 1) * page - 1 of sequence b is page_table[b, i]. It "
        "needs kv_lengths, behind which entries do not matter (-1 is customary). q is (B, Hq, Nq, D) by layout, or (T, "
        "Hq, D) with cu_seqlens.",
        Role.PER_CALL, axes="memory", theirs=("block_table", "block_tables", "page_indices"),
    )]  # fmt: skip
    dropout_p: Annotated[float, Option(
        "Weights are dropped with this probability, the others scaled by 1 / (1 - dropout_p).",
        Role.PER_CALL, 0.0, ("dropout", "dropout_rate"), flag=("--dropout", "Dropout probability."),
    )]  # fmt: skip
    seed: Annotated[int | None, Option(
        "The same seed drops the same pairs on every backend. Without a seed each call draws one.",
        Role.PER_CALL, theirs=("generator", "rng", "dropout_rng"),
    )]  # fmt: skip
    sinks: Annotated[Any, Option(
        "(Hq,): one more logit in the softmax of each row, without a value.",
        Role.PER_CALL, theirs=("s_aux", "attention_sinks"), axes="heads",
        flag=("--sinks", "One attention sink a head."),
    )]  # fmt: skip
    layout: Annotated[Layout, Option(
        '"bhnd", or "bnhd" for (..., N, H, D) arrays.',
        default="bhnd", theirs=("tensor_layout", "qkv_layout", "qkv_format"),
    )]  # fmt: skip
    deterministic: Annotated[bool, Option(
        "Give the same bits for the same inputs in the backward pass on a GPU too; all other passes always do. The "
        "bits of a decoded sequence then do not depend on the rest of the batch, and on the CPU none on the number of "
        "threads. The environment variable FLASHKIT_DETERMINISTIC=1 asks for it in every call.", default=False,
    )]  # fmt: skip
    precision: Annotated[Precision | None, Option(
        '"tf32" allows TensorFloat-32 products for float32 inputs on GPUs that have them. None or "highest" is full '
        'float32; of e4m3 arrays None may round weights to e4m3 as well. "fp8" quantises float16 and bfloat16 to e4m3 '
        'first, q and k rotated: as quantize(x, "e4m3", "block", rotate=True), and for v without rotation; with '
        'kv_lengths, cu_seqlens or page_table each token by itself, "token".',
    )]  # fmt: skip


OPTIONS: Mapping[str, Option] = {name: get_args(hint)[1] for name, hint in Options.__annotations__.items()}
"""The table."""

TYPES = {name: get_args(hint)[0] for name, hint in Options.__annotations__.items()}

DEFAULTS = {name: option.default for name, option in OPTIONS.items()}

PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of numbers, flags and names."""

FIXED = tuple(name for name, option in OPTIONS.items() if not option.by_position)
"""Options that mean the same for a part of the queries and keys as for all."""

NUMBERS = tuple(name for name, hint in TYPES.items() if hint in (float, float | None))
"""Options that are floating numbers."""


def with_axes(*axes: str) -> tuple[str, ...]:
    """Names of the options that are arrays of these axes, in the order of the table."""
    return tuple(name for name, option in OPTIONS.items() if option.axes in axes)


def ours(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The options among arguments of another library, by our names; without those that are None."""
    names = {other: name for name, option in OPTIONS.items() for other in (name, *option.theirs)}
    return {names[name]: value for name, value in theirs.items() if name in names and value is not None}


_ELSEWHERE = {
    "mask=~key_padding_mask[:, None, None, :]": ("key_padding_mask",),  # PyTorch's is True where a key is ignored
    "cu_seqlens=(of q, of k)": ("cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "cu_seqlens_kv"),
    "return_lse": ("return_softmax_lse", "return_residual"),
    "flashkit.weights(q, k, ...)": ("need_weights", "return_attn_probs", "return_weights"),
}
"""What to write for arguments of other libraries that are no option's."""

_NOT_NEEDED = {
    "enable_gqa": "grouped-query heads need no flag",
    "max_seqlen": "no longest sequence is needed",
    "max_seqlen_q": "no longest sequence is needed",
    "max_seqlen_k": "no longest sequence is needed",
}


def unknown(
    function: str, names: Iterable[str], known: Collection[str] = (*OPTIONS, "out", "return_lse", "backend")
) -> TypeError:  # fmt: skip
    """The error for keyword arguments that do not exist: it says which was probably meant."""
    import difflib  # only for errors

    name = str(next(iter(names)))
    message = f"{function}() got an unexpected argument {shown(name)}: "
    if name.lower() in _NOT_NEEDED:
        return TypeError(message + _NOT_NEEDED[name.lower()])
    theirs = {ours: option.theirs for ours, option in OPTIONS.items()} | _ELSEWHERE
    meant = next((ours for ours, names in theirs.items() if name.lower() in names), None)
    known = [each for each in known if each != name]
    meant = meant or next(iter(difflib.get_close_matches(name.lower(), known, 1)), None)
    return TypeError(message + (f"did you mean {meant}?" if meant else f"expected one of {', '.join(known)}"))


F = TypeVar("F", bound=Callable[..., Any])


def misplaced(
    function: str, more: tuple[Any, ...], options: Iterable[str], tensors: Sequence[str] = ("q", "k", "v")
) -> TypeError:  # fmt: skip
    """The error for positional arguments behind the tensors, for other names of these, and for absent ones."""
    listed = f"{', '.join(tensors[:-1])} and {tensors[-1]}"
    if more:
        return TypeError(f"{function}() takes {listed} by position: pass others by name, such as mask= or causal=")
    names = {"query": "q", "key": "k", "value": "v", "queries": "q", "keys": "k", "values": "v"}
    for name in options:
        if names.get(name) in tensors:
            return TypeError(f"{function}() got an unexpected argument {name!r}: did you mean {names[name]}?")
    return TypeError(f"{function}() expected {listed}")


def by_position(function: F) -> F:
    """Give a function the errors of `misplaced` where Python's own know no other names of its tensors.

    `attention` and its adapters for tensors and traced arrays have no room for a function around them: the first is
    counted in fractions of a microsecond, and compilers look into the others.
    """
    taken = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [p.name for p in taken if p.default is p.empty]
    module = "" if function.__module__.startswith(("flashkit.api", "flashkit.call")) else f"{function.__module__}."

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError:
            more = args[len(taken) :]
            if not more and all(name in options for name in needed[len(args) :]):
                raise
        raise misplaced(f"{module}{function.__name__}", more, options, needed)

    return cast(F, call)


def unknown_of(function: Callable[..., Any], names: Iterable[str]) -> TypeError:
    """As `unknown`, of a function with the arguments of another library."""
    own, *_ = names
    known = [*inspect.signature(function).parameters]
    theirs = next((option.theirs for name, option in OPTIONS.items() if name == own), ())
    meant = next((name for name in known if name in theirs), None)
    if meant is None:
        return unknown(function.__name__, names, known)
    return TypeError(f"{function.__name__}() got an unexpected argument {shown(own)}: did you mean {meant}?")


def closed(function: F) -> F:
    """Give a function whose **others are refused by `unknown` the signature without them."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def documented(*left_out: str) -> Callable[[F], F]:
    """Give a function with **options their names in its signature, and their meanings for {options}."""
    taken = [name for name in OPTIONS if name not in left_out]

    def document(function: F) -> F:
        own = inspect.signature(function)
        first = [p for p in own.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        positional = [p.replace(default=p.empty) for p in first if p.kind is not p.KEYWORD_ONLY]
        named = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default,
                annotation=Options.__annotations__[name].__origin__,
            )
            for name in taken
        ]  # fmt: skip
        rest = [p for p in first if p.kind is p.KEYWORD_ONLY]
        function.__signature__ = own.replace(parameters=[*positional, *named, *rest])  # type: ignore[attr-defined]
        lines = "\n".join(f"{name}\n    {_wrapped(OPTIONS[name].meaning)}" for name in taken)
        return filled(function, "options", lines)

    return document


def filled(function: F, name: str, text: str) -> F:
    """The function with this text for {name} in its docstring."""
    if doc := function.__doc__:  # absent under python -OO
        before = doc.partition(f"{{{name}}}")[0]
        indent = " " * (len(before) - len(before.rstrip(" ")))  # none from Python 3.13 on
        function.__doc__ = doc.replace(f"{{{name}}}", re.sub(r"\n(?=.)", "\n" + indent, text))
    return function


def _wrapped(text: str) -> str:
    """A paragraph in a docstring."""
    import textwrap

    return "\n    ".join(textwrap.wrap(text, 112, break_long_words=False, break_on_hyphens=False))
