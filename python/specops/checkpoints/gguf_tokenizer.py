# SPDX-License-Identifier: Apache-2.0
"""Conversion of a GGUF tokenizer to Hugging Face's tokenizer.json and tokenizer_config.json.

Three kinds are supported, with ggml's names: "llama", SentencePiece BPE with token scores;
"gemma4", the same with merges; and "gpt2", byte-level BPE with merges. Sources: docs/gguf.md of
github.com/ggml-org/ggml; the tokenizers library for the JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specops.checkpoints.errors import ModelError

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"  # SentencePiece's space character
_GGML = "tokenizer.ggml."
_SPECIALS = ("bos", "eos", "unknown", "padding")
_NAMES = {"unknown": "unk", "padding": "pad"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
)
# Regular expression for letters of scripts with upper and lower case, as in DeepSeek-LLM's
# tokenizer.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
# Expressions of DeepSeek-V3's tokenizer: CJK characters; and words, punctuation and spaces.
_DEEPSEEK_V3_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


class _Split(NamedTuple):
    """Pre-tokenization rules of a kind of byte-level BPE.

    Attributes:
        patterns: regular expressions that split a text, applied in order.
        like_gpt2: whether GPT-2's regular expression then splits the parts further.
        ignores_merges: whether a part that is a token is encoded as that token, even if merges
            would not produce it.
        adds_bos: whether texts begin with the BOS token if the file does not specify it.
        is_normalized: whether texts are normalized to NFC.
    """

    patterns: tuple[str, ...] = ()
    like_gpt2: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    is_normalized: bool = False


_GPT2 = _Split(like_gpt2=True)
_QWEN2 = _Split((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), is_normalized=True)
_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_LLAMA3 = _Split((_THREE_DIGITS,), ignores_merges=True, adds_bos=True)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BUT_HAN = r"&&[^\p{Han}]"  # removes Chinese characters from a set


def _cased_words(but: str = "") -> str:
    """Return the expression of words with contractions; `but` removes letters from the sets."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{upper}*{lower}+{_CONTRACTIONS}?|{first}{upper}+{lower}*{_CONTRACTIONS}?"


_GPT_4O = _Split((rf"{_cased_words()}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",))
# llama.cpp's rules for files that do not name the tokenizer.
_DEFAULT = _Split(
    (
        r"[\p{P}$+<=>^~|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    )
)
# Value of tokenizer.ggml.pre -> rules. Source: llama.cpp (src/llama-vocab.cpp), which for most
# kinds quotes the expression of the original tokenizer.json.
_SPLITS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "smaug-bpe": _Split((_THREE_DIGITS,)),
    "dbrx": _Split((_THREE_DIGITS,)),
    "tekken": _Split(
        (rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",),
        ignores_merges=True,
        adds_bos=True,
    ),
    "smollm": _Split((r"\p{N}",), like_gpt2=True),
    "deepseek-llm": _Split(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CHINESE,
            r"\p{N}+",
        )
    ),
    "deepseek-v3": _Split((r"\p{N}{1,3}", _DEEPSEEK_V3_CHINESE, _DEEPSEEK_V3_WORDS)),
    "qwen35": _Split((_QWEN35,), is_normalized=True),
    "gpt-4o": _GPT_4O,
    "kanana2": _GPT_4O,
    "pixtral": _LLAMA3,
    "chatglm-bpe": _Split((_THREE_DIGITS,)),
    "glm4": _Split((_THREE_DIGITS,), ignores_merges=True),
    "kimi-k2": _Split((rf"\p{{Han}}+|{_cased_words(_BUT_HAN)}|\p{{N}}{{1,3}}|{_REST}",)),
    "deepseek-coder": _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CHINESE, r"\p{N}")),
}

# Texts of tokens that end an output in every file, from llama.cpp: the metadata of chat models may
# name only the end of a document as end of sequence. End tokens of unsupported architectures are
# omitted, such as </s>, which is an HTML tag in Gemma's vocabulary.
_END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
# End tokens of fill-in-the-middle requests: metadata key -> texts that the token may have.
_FILL_IN_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# A vocabulary with all of these is gpt-oss', whose <|end|> ends a message, not the output.
_HARMONY = frozenset(("<|return|>", "<|call|>", "<|end|>"))


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an output; eos_token_id comes first.

    The rules are those of llama.cpp (src/llama-vocab.cpp, special_eog_ids): the metadata keys for
    the end of a sequence, a turn and a message; texts that end outputs in every file; and the
    fill-in-the-middle tokens that separate files.

    Args:
        metadata: key-value pairs of a GGUF file.

    Raises:
        ModelError: a key holds an invalid token id.
    """
    tokens = _list(metadata, "tokens", "texts") or []
    ids = {text: i for i, text in enumerate(tokens)}
    found = [_token_id(metadata, name, tokens) for name in ("eos", "eot", "eom")]
    found += [
        _checked_id(f"{_GGML}eos_token_ids", one, tokens)
        for one in _list(metadata, "eos_token_ids", "numbers") or ()
    ]
    texts = _END_TEXTS
    if ids.keys() >= _HARMONY:
        texts -= {"<|end|>"}
    found += sorted(ids[text] for text in texts if text in ids)
    for name, own in _FILL_IN_ENDS.items():
        by_text = next((ids[text] for text in own if text in ids), None)
        by_key = _token_id(metadata, name, tokens)
        found.append(by_text if by_key is None else by_key)
    return list(dict.fromkeys(one for one in found if one is not None))


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json, by file name.

    Args:
        metadata: key-value pairs of a GGUF file.

    Raises:
        ModelError: the tokenizer is missing, or of an unknown kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokens", "texts")
    if not tokens:
        raise ModelError("tokenizer.ggml.tokens is missing: the file has no tokenizer")
    if len(set(tokens)) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens must not repeat a token")
    types = _list(metadata, "token_type", "numbers") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.token_type must have {len(tokens)} types, got {len(types)}"
        )
    specials = _special_tokens(metadata, tokens)
    # End tokens never appear in the text, even if the file declares them as normal tokens.
    ends = set(end_token_ids(metadata))
    types = [_CONTROL if i in ends else one for i, one in enumerate(types)]
    unknown = specials.get("unk_token")
    if kind == "llama":
        adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
        merges = _merges(_normal_scores(metadata, tokens, types))
        whole = _sentencepiece(tokens, types, unknown, merges, adds_space)
    elif kind == "gemma4":
        whole = _sentencepiece(tokens, types, unknown, _stored_merges(metadata))
        whole["pre_tokenizer"] = _isolated(r"\n+")
        # As in llama.cpp: some files say false, but the model needs it.
        metadata = {**metadata, "tokenizer.ggml.add_bos_token": True}
    elif kind == "gpt2":
        whole = _byte_level(metadata, tokens)
    else:
        raise ModelError(f"tokenizer.ggml.model must be llama, gemma4 or gpt2, got {kind}")
    whole["added_tokens"] = [
        _added_token(i, tokens[i], types[i] != _USER_DEFINED)
        for i in range(len(tokens))
        if types[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    whole["post_processor"] = _around(metadata, specials, tokens, kind == "gpt2")
    config: dict[str, Any] = dict(specials)
    if metadata.get("tokenizer.chat_template"):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    empty = {"version": "1.0", "truncation": None, "padding": None}
    return {"tokenizer.json": {**empty, **whole}, "tokenizer_config.json": config}


def _list(metadata: Mapping[str, Any], key: str, of: str) -> list[Any] | None:
    """Return a tokenizer list from the metadata, of "texts" or "numbers"; None if absent."""
    found = metadata.get(f"tokenizer.ggml.{key}")
    kinds = {str} if of == "texts" else {int, float}
    is_list = isinstance(found, list) and set(map(type, found)) <= kinds
    if found is not None and not is_list:
        raise ModelError(f"tokenizer.ggml.{key} must be a list of {of}, got {found!r:.60}")
    return found


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """Return the texts of special tokens by role, such as "bos_token"."""
    found = {}
    for name in _SPECIALS:
        token = _token_id(metadata, name, tokens)
        if token is not None:
            found[f"{_NAMES.get(name, name)}_token"] = tokens[token]
    return found


def _token_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    """Return the id under a token's key; None if the file does not have the key."""
    key = f"{_GGML}{name}_token_id"
    return None if metadata.get(key) is None else _checked_id(key, metadata[key], tokens)


def _checked_id(key: str, token: Any, tokens: Sequence[str]) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < len(tokens):
        raise ModelError(f"{key} must be a token id below {len(tokens)}, got {token}")
    return token


def _added_token(i: int, text: str, is_special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": i, "content": text, "special": is_special, **flags}


def _normal_scores(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> dict[str, float]:
    """Return the scores of normal tokens, by text."""
    scores = _list(metadata, "scores", "numbers")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores must have a score for each token")
    return {tokens[i]: scores[i] for i in range(len(tokens)) if types[i] == _NORMAL}


def _sentencepiece(
    tokens: Sequence[str],
    types: Sequence[int],
    unknown: str | None,
    merges: list[tuple[str, ...]],
    adds_space: bool = False,
) -> dict[str, Any]:
    """Return the parts of tokenizer.json for SentencePiece BPE.

    Args:
        tokens: texts of the tokens.
        types: types of the tokens.
        unknown: text of the unknown token; None: there is none.
        merges: pairs of tokens that are merged, the best first.
        adds_space: whether a space is put before each text.
    """
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    spelt = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [spelt, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizers: list[dict[str, Any]] = [replaced]
    if adds_space:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        "type": "BPE",
        "vocab": {text: i for i, text in enumerate(tokens)},
        "merges": _compact(merges),
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": _BYTE in types,
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(scores: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return all pairs of tokens that together form a token, by descending score of that token."""
    return [
        (first, second)
        for text in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(text))
        if (first := text[:cut]) in scores and (second := text[cut:]) in scores
    ]


def _compact(merges: list[tuple[str, ...]]) -> list[tuple[str, ...]] | list[str]:
    """Return merges as texts, which the tokenizers library reads faster than pairs.

    Merges stay pairs if a text would be ambiguous: if it has another space than the one between the
    two tokens, or begins like a line with the version of a file of merges.
    """
    texts = list(map(" ".join, merges))
    lines = "\n".join(("", *texts))
    is_clear = lines.count(" ") == len(texts) and "\n#version" not in lines
    return texts if is_clear else merges


def _stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the merges that the file lists."""
    merges = _list(metadata, "merges", "texts")
    if merges is None:
        raise ModelError("tokenizer.ggml.merges is missing")
    return [tuple(merge.split(" ")) for merge in merges]


def _isolated(expression: str) -> dict[str, Any]:
    """Return a pre-tokenizer that splits texts before and after each match."""
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    split = _split_of(metadata)
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    parts = [_isolated(one) for one in split.patterns]
    parts.append({**bytes_of, "use_regex": split.like_gpt2})
    model = {
        "type": "BPE",
        "vocab": {text: i for i, text in enumerate(tokens)},
        "merges": _compact(_stored_merges(metadata)),
        "ignore_merges": split.ignores_merges,
    }
    return {
        "normalizer": {"type": "NFC"} if split.is_normalized else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "decoder": {**bytes_of, "use_regex": True},
        "model": model,
    }


def _split_of(metadata: Mapping[str, Any]) -> _Split:
    pre = metadata.get(f"{_GGML}pre", "default")
    if not isinstance(pre, str) or pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise ModelError(f"tokenizer.ggml.pre must be one of {known}, got {pre}")
    return _SPLITS[pre]


def _around(
    metadata: Mapping[str, Any],
    specials: Mapping[str, str],
    tokens: Sequence[str],
    is_byte_level: bool,
) -> dict[str, Any] | None:
    """Return the post-processor, which adds BOS and EOS around a text; None if it adds none."""
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    named = {}
    # Default if the file does not specify it: SentencePiece and some others add BOS.
    adds_bos = not is_byte_level or (_split_of(metadata).adds_bos and "bos_token" in specials)
    for name, default in (("bos", adds_bos), ("eos", False)):
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            if f"{name}_token" not in specials:
                raise ModelError(
                    f"tokenizer.ggml.{name}_token_id is missing, but add_{name}_token is true"
                )
            text = specials[f"{name}_token"]
            token = {"SpecialToken": {"id": text, "type_id": 0}}
            parts.insert(0 if name == "bos" else len(parts), token)
            named[text] = {"id": text, "ids": [tokens.index(text)], "tokens": [text]}
    if not named:
        return None
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": pair,
        "special_tokens": named,
    }
