"""The pre-tokenizers that byte-level BPE vocabularies in GGUF files name under `tokenizer.ggml.pre`.

A pre-tokenizer cuts text into words before any merge; with the wrong one the ids are quietly worse. Each
entry is the splitting rule of the models' own published tokenizer files, as regular expressions applied one
after the other, every one to the pieces the ones before it have left.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from mvllm.core.errors import ModelFileError


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before merging."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a whole word that is in the vocabulary is taken at once
    normalize_nfc: bool = False  # the model's own tokenizer composes characters first

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.normalize_nfc else None


_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _cl100k(digits: str) -> str:
    """The rule of OpenAI's cl100k encoding, with numbers cut into runs of `digits`."""
    words = rf"(?i:{_CONTRACTIONS})|{_BEFORE_WORD}\p{{L}}+|{digits}"
    return rf"{words}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}"


def _o200k(digits: str, contractions: str) -> str:
    """The rule of OpenAI's o200k encoding: words also end where lower case turns to upper case."""
    words = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{contractions}|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"


_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True)
_LLAMA3_BY_MERGES = PreTokenizer(_LLAMA3.patterns)
_CL100K_SINGLE_DIGITS = PreTokenizer((_cl100k(r"\p{N}"),))
_QWEN2 = PreTokenizer(_CL100K_SINGLE_DIGITS.patterns, normalize_nfc=True)
_GPT4O = PreTokenizer((_o200k(r"\p{N}{1,3}", rf"(?i:{_CONTRACTIONS})?"),))
_TEKKEN = PreTokenizer((_o200k(r"\p{N}", ""),), ignore_merges=True)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_DEFAULT = PreTokenizer(
    (
        r"[\p{P}\$\+<=>\^~\|]+",
        rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3_BY_MERGES),
    "qwen2": _QWEN2,
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), _CL100K_SINGLE_DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
}


def named_pre_tokenizer(name: str | None, *, allow_unknown: bool) -> PreTokenizer:
    """The pre-tokenizer a GGUF file names; "default" for an absent or unknown name if `allow_unknown`.

    Raises:
        ModelFileError: the name is absent or unknown and `allow_unknown` is false.
    """
    known = PRE_TOKENIZERS.get(name) if name is not None else None
    if known is not None:
        return known
    if allow_unknown:
        return _DEFAULT
    found = "has no tokenizer.ggml.pre" if name is None else f"names the unknown pre-tokenizer {name!r}"
    raise ModelFileError(
        f"the file {found}, so its text would be cut into wrong tokens; known are "
        f"{', '.join(sorted(PRE_TOKENIZERS))}. Use a newer conversion of the model, or go on "
        f"with 'default' at the price of worse output (--allow-unknown-pretokenizer)"
    )
