"""Command: generate text from a saved run. The text goes to stdout, everything else to stderr."""

import io
import math
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from titanlite.data.chat.encoder import NO_END, ChatEncoder
from titanlite.data.chat.messages import Message, parse_conversation
from titanlite.data.sources.pieces import BadRowError
from titanlite.data.tokenizer import Tokenizer
from titanlite.generation.generate import Prompt, Sampling, TextStream, Transcript, encode_prompts, generate
from titanlite.generation.kv_cache import remembering
from titanlite.hf.generation_defaults import GENERATION_FILE, GenerationDefaults
from titanlite.models.family import LanguageModel
from titanlite.precision import DTYPES
from titanlite.runtime.errors import ConfigError, Problem, Rules, UserError, raise_problems
from titanlite.runtime.logging import log, setup_logging
from titanlite.runtime.settings import setting
from titanlite.tools.command import (
    AllowImport,
    Count,
    OptionalCount,
    RunFolder,
    check_chat_template,
    check_options,
    read_options_and_overrides,
    run_command,
)
from titanlite.tools.generate.chat import DEFAULT_CHAT_TOKENS, ChatModel, Dialog, answer_all, converse
from titanlite.tools.generate.texts import print_texts, read_prompts
from titanlite.tools.saved_run import SavedRun, Weights, open_run, reading
from titanlite.tools.stores import apply_storage, check_sections

DEFAULT_NEW_TOKENS = 200
TEMPERATURE = 0.8
ALL = 0
"""The value of --top-k that keeps all tokens."""


@dataclass(frozen=True)
class Options:
    """Continue prompts with the model and the tokenizer of a run, whatever mesh saved it.

    stdout shows each prompt and its continuation, stderr everything else. Several prompts are generated as one batch
    and printed one below the other. A text ends at a token that ends documents, which is not printed, or after
    --max-new-tokens. The same arguments give the same text. With --temperature 0 a text does not depend on the other
    prompts; otherwise it depends on --seed and on the prompt's position among them.
    """

    run: RunFolder = setting(is_path=True)
    """dump folder of a run, for its latest valid checkpoint; or one folder step-N"""
    prompt: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT")]] = ()
    """text to continue"""
    prompt_file: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE")]] = setting(
        (), is_path=True
    )
    """file with a text to continue; -: stdin"""
    max_new_tokens: OptionalCount = setting(None, f"leave it out for {DEFAULT_NEW_TOKENS}", least=1)
    """maximum tokens to generate per prompt; None: 200, with --chat 1,024, or fewer if the model has fewer positions
    left"""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T")] = setting(
        None, "write 0 for the most likely token, or about 0.8 for varied text", least=0, below=math.inf
    )
    """divides the logits; 0: always the most likely token; None: the model's own default, else 0.8"""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = setting(None, "write 0 to sample from all", least=ALL)
    """sample from the K most likely tokens; 0: from all; None: the model's own default, else all"""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = setting(
        None, "write 1 to sample from all", above=0, most=1
    )
    """sample from the fewest most likely tokens with total probability P; None: the model's own default, else 1"""
    seed: Count = setting(0, "write a number in this range", least=0, most=2**63 - 1)
    """seed of the sampling"""
    ignore_eos: bool = False
    """continue after the end of a document, and print the token that ends it"""
    weights: Weights = "last"
    """last: the weights of the checkpoint's step; ema: their average, of a run with optimizer.ema_decay above 0"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if available"""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """of weights and arithmetic; auto: the dtype of the run's weights"""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = setting(None, is_path=True)
    """tokenizer.json or its folder; None: the run's own"""
    chat: bool = False
    """converse: a line of stdin is a message, --prompt and --prompt-file are messages that are answered in turn"""
    system: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """system message of the conversation; with --chat"""
    chat_template: Annotated[str, tyro.conf.arg(metavar="FILE")] = setting("", is_path=True)
    """chat template in Jinja; empty: the tokenizer's own; with --chat"""
    allow_import: AllowImport = False


def main(argv: Sequence[str]) -> None:
    """Print the texts. Raises UserError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "generate")
    prompts_given, of_prompts = read_prompts(options.prompt, options.prompt_file, required=not options.chat)
    raise_problems([*problems, *of_prompts, *check(options), *check_sections(overrides, ("storage",))])
    apply_storage(overrides)
    setup_logging(0, sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # for terminals that are not UTF-8
    run = open_run(options.run, allow_import=options.allow_import).with_weights(options.weights)
    if options.chat:
        with open_chat(run, options) as model:
            dialog = Dialog(model, options.system)
            if prompts_given:
                answer_all(dialog, (prompt.text.removesuffix("\n") for prompt in prompts_given))
            else:
                converse(dialog)
        return
    found = prepare(run, prompts_given, options)
    streams = [TextStream(found.tokenizer, prompt.ids) for prompt in found.prompts]
    began = time.perf_counter()
    written = print_texts(found.prompts, streams, found.steps, found.eos_ids)
    took = time.perf_counter() - began
    log.info("%s tokens in %.1f s, %.1f tokens/s", f"{written:,}", took, written / took)


@dataclass(frozen=True)
class Continuation:
    """A generation that is about to start. prompts: tokenized. steps, eos_ids: see `generate`."""

    prompts: Sequence[Prompt]
    steps: Iterator[Sequence[int | None]]
    tokenizer: Tokenizer
    eos_ids: Collection[int]


def check(options: Options) -> list[Problem]:
    """Problems of the options, except for the prompts."""
    rules = Rules("--", options, check_options(options))
    has_device = torch.cuda.is_available() or options.device != "cuda"
    rules.require("device", has_device, "a GPU that torch can use", "leave it out, or use cpu")
    rules.needs("system", options.chat or not options.system, "--chat")
    rules.needs("chat_template", options.chat or not options.chat_template, "--chat")
    rule = "not with --chat: an answer ends with the assistant's turn, or at --max-new-tokens"
    rules.require("ignore_eos", not (options.chat and options.ignore_eos), rule, "leave it out")
    return rules.problems + check_chat_template(options.chat_template)


def generated_texts(run: SavedRun, prompts: Sequence[Prompt], options: Options) -> list[str]:
    """The continuation of each prompt, as one batch. options: checked; those of the run and prompts are not used.

    Raises UserError.
    """
    found = prepare(run, prompts, options)
    texts = []
    for prompt, tokens in zip(found.prompts, zip(*found.steps, strict=True), strict=True):
        stream = TextStream(found.tokenizer, prompt.ids)
        shown = [stream.add(token) for token in tokens if token is not None and token not in found.eos_ids]
        texts.append("".join(shown) + stream.rest())
    return texts


def prepare(run: SavedRun, prompts: Sequence[Prompt], options: Options) -> Continuation:
    """Tokenize the prompts and load the model. Raises UserError."""
    tokenizer = find_tokenizer(run, options.tokenizer)
    max_seq_len = run.hyper_parameters.max_seq_len
    prompts = encode_prompts(
        prompts,
        tokenizer,
        starts_with_bos=run.config.data.adds_bos,
        max_new_tokens=options.max_new_tokens or 1,
        max_seq_len=max_seq_len,
    )
    room = max_seq_len - max(len(prompt.ids) for prompt in prompts)
    max_new_tokens = options.max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
    defaults = run.generation_defaults()
    eos_ids = defaults.ends(tokenizer.eos_id)
    warn(run, prompts, eos_ids, max_new_tokens)
    model = load_model(run, options)
    steps = generate(
        model,
        [prompt.ids for prompt in prompts],
        choose_sampling(options, defaults),
        max_new_tokens=max_new_tokens,
        eos_ids=() if options.ignore_eos else eos_ids,
    )
    return Continuation(prompts, steps, tokenizer, () if options.ignore_eos else eos_ids)


@contextmanager
def open_chat(run: SavedRun, options: Options) -> Iterator[ChatModel]:
    """The run's model for conversations, which is not used otherwise inside the block. Raises UserError."""
    tokenizer = find_tokenizer(run, options.tokenizer, options.chat_template)
    if tokenizer.chat_template is None:
        rule = f"needed: the tokenizer of {run.path} has no chat template, so it is not known how it writes a turn"
        remedy = "write the path of a template, or leave out --chat to continue texts"
        raise ConfigError([Problem("--chat-template", None, rule, remedy)])
    encoder = ChatEncoder(tokenizer)
    if options.system and (fault := encoder.fault_of_system(options.system)):
        remedy = "leave it out, and begin the first message with these instructions"
        raise ConfigError([Problem("--system", options.system, fault, remedy)])
    if encoder.fault_of_end:
        log.warning("%s, so %s", encoder.fault_of_end, NO_END)
    defaults = run.generation_defaults()
    sampling = choose_sampling(options, defaults)
    with remembering(load_model(run, options), [0], 0) as cache:
        yield ChatModel(
            Transcript(cache),
            tokenizer,
            encoder,
            sampling,
            defaults.ends(tokenizer.eos_id) | {*encoder.stop_ids},
            options.max_new_tokens or DEFAULT_CHAT_TOKENS,
            run.hyper_parameters.max_seq_len,
            run.seq_len,
        )


def answer_to(run: SavedRun, messages: Sequence[Message], options: Options) -> str:
    """The answer to a conversation. options: as for generated_texts. Raises UserError."""
    try:
        conversation = parse_conversation({"messages": list(messages)})
    except BadRowError as error:
        raise UserError(f"messages: {error}") from None
    with open_chat(run, options) as model:
        return "".join(model.answer(conversation))


def load_model(run: SavedRun, options: Options) -> LanguageModel:
    """The run's model on the device and in the dtype of the options. Raises UserError."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu and options.device != "cpu" else torch.device("cpu")
    dtype = DTYPES.get(options.dtype, run.dtype)
    average = "average of the weights, " if run.weights == "ema" else ""
    log.info("%s: %s%s, %s on %s", run.path, average, run.family.name, str(dtype).removeprefix("torch."), device)
    with reading(run.path):
        return run.model(device, dtype)


def choose_sampling(options: Options, defaults: GenerationDefaults) -> Sampling:
    """The options, and for what they leave open the model's own defaults, which are logged, else those of titanlite."""
    given = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    own = {"temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p}
    taken = {name: value for name, value in own.items() if value is not None and given[name] is None}
    if taken:
        settings = ", ".join(f"{name} {value:g}" for name, value in taken.items())
        log.info("Sampling: %s, the model's own defaults (%s); options override them", settings, GENERATION_FILE)
    if defaults.not_applied:
        log.warning("%s is not applied: %s", GENERATION_FILE, ", ".join(defaults.not_applied))
    chosen = {name: taken.get(name, value) for name, value in given.items()}
    return Sampling(
        temperature=TEMPERATURE if chosen["temperature"] is None else chosen["temperature"],
        top_k=None if chosen["top_k"] in (None, ALL) else int(chosen["top_k"]),
        top_p=1.0 if chosen["top_p"] is None else chosen["top_p"],
        seed=options.seed,
    )


def find_tokenizer(run: SavedRun, path: str | None, chat_template: str = "") -> Tokenizer:
    """See SavedRun.tokenizer_for. Raises ConfigError if the run has no tokenizer."""
    tokenizer = run.tokenizer_for(path, chat_template)
    if tokenizer is None:
        why = "was trained on tokens" if run.manifest.facts["tokenizer"] is None else "has lost its tokenizer"
        raise ConfigError([Problem("--tokenizer", None, f"needed: {run.path} {why}", "write its tokenizer's path")])
    return tokenizer


def warn(run: SavedRun, prompts: Sequence[Prompt], eos_ids: Collection[int], max_new_tokens: int) -> None:
    """Log what limits the quality or the length of the texts."""
    if not eos_ids:
        log.warning("the tokenizer names no EOS: each text ends after --max-new-tokens = %d", max_new_tokens)
    trained = run.seq_len
    if max(len(prompt.ids) for prompt in prompts) + max_new_tokens > trained:
        log.warning("the run was trained on sequences of %d tokens: longer texts are extrapolated", trained)


if __name__ == "__main__":
    run_command(main)
