"""Chat templates in three published formats, tokenizers for them, and random conversations."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from titanlite.data.bpe import train_bpe
from titanlite.data.chat.messages import Message
from titanlite.data.tokenizer import Tokenizer

QWEN = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system, messages = messages[0]['content'] + '\\n\\n', messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first and system is defined else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
STYLES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL}
SPECIAL = {
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>"],
}
TEXT = "user assistant system\n\n the model reads a few words and learns which of them follow the others é 日本\n"
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression of Llama 3 that splits text into words: line ends belong to the characters before them."""
EDGE_CASES = ["\n", "\n\n", "  ", "\t", "😀", "a\u0301", "\u200b", "{{ x }}", "<think>", "[INST]", "1234"]
WORDS = [*TEXT.split(), *EDGE_CASES]


def without_generation(template: str) -> str:
    return re.sub(r"\{%-? (end)?generation %\}", "", template)


def make_tokenizer(style: str, template: str, folder: Path) -> Tokenizer:
    """The style's tokenizer with this chat template. qwen, llama: byte-level. mistral: made by SentencePiece, with a
    space before the first word only. old-mistral: with one after each special token."""
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    file = folder / "tokenizer.json"
    special = SPECIAL[style.removeprefix("old-")]
    if "mistral" in style:
        made = _with_byte_fallback(special)
        if style == "mistral":
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.save(str(file))
        return Tokenizer(file, bos="<s>", eos="</s>")
    train_bpe(iter([TEXT] * 4), 400, folder, special)
    made = tokenizers.Tokenizer.from_file(str(file))
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA_WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.add_tokens(["<think>"])
    made.add_special_tokens([AddedToken("<|tool|>", lstrip=True, rstrip=True)])
    made.save(str(file))
    return Tokenizer(file, bos=special[0] if style == "llama" else "")


def _with_byte_fallback(special: list[str]) -> tokenizers.Tokenizer:
    """A BPE of words that start with "▁", in which the special tokens are words of the vocabulary."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *special, *byte_tokens], show_progress=False)
    made.train_from_iterator([TEXT] * 4, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][: 1 + len(special)]
    content["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.pre_tokenizer = None
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def random_conversations(count: int, seed: int, words: Sequence[str] = WORDS) -> list[list[Message]]:
    """Conversations with and without a system prompt, of one to three answers of zero to ten words."""
    rng = random.Random(seed)

    def text() -> str:
        edge = rng.choice(["", "", " "])
        return edge + " ".join(rng.choices(words, k=rng.randint(0, 10))) + edge

    found: list[list[Message]] = []
    for _ in range(count):
        messages = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 3)):
            answer = rng.choice(["", "the", text(), text()])
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": answer}]
        found.append(messages)
    return found
