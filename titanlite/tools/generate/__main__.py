"""The command's arguments, and what it prints: text to stdout, all else to stderr. Exit code 2 for bad arguments."""

from titanlite.runtime.failure import end_on_interrupt

if __name__ == "__main__":  # before the imports that take seconds
    end_on_interrupt()

import argparse
import io
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from titanlite.data.tokenizer import Tokenizer
from titanlite.precision import DTYPES
from titanlite.runtime.errors import ConfigError, Problem, require
from titanlite.runtime.logging import log, setup_logging
from titanlite.tools.command import run_command
from titanlite.tools.generate.decoding import TextStream
from titanlite.tools.generate.generation import generate
from titanlite.tools.generate.printing import print_texts
from titanlite.tools.generate.prompts import Prompt, encode_prompts, read_prompts
from titanlite.tools.generate.sampling import Sampling
from titanlite.tools.saved_run import SavedRun, open_run, reading

USUAL_NEW_TOKENS = 200

DESCRIPTION = """\
Goes on writing where a prompt ends, with the model and the tokenizer of a run, whatever mesh saved it.

stdout has the prompt and what follows it, as it is written; stderr everything else. Several prompts are written on
together and shown one under the other: the first as it is written, each of the others once those above it are
complete. A text ends with the token that ends documents, which is not shown, or after --max-new-tokens.

The same arguments give the same text. With --temperature 0 a text does not depend on the other prompts; what is
drawn depends on --seed and on a prompt's place among them.
"""


def main(argv: Sequence[str]) -> None:
    """Raises UserError."""
    own = parse_arguments(argv)
    setup_logging(0, sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows what it can
    run = open_run(own.run)
    tokenizer = find_tokenizer(run, own.tokenizer)
    prompts = encode_prompts(
        own.prompts,
        tokenizer,
        starts_with_bos=run.config.data.add_bos,
        max_new_tokens=own.max_new_tokens or 1,
        max_seq_len=run.hyper_parameters.max_seq_len,
    )
    if own.max_new_tokens is None:
        room = run.hyper_parameters.max_seq_len - max(len(prompt.ids) for prompt in prompts)
        own.max_new_tokens = min(USUAL_NEW_TOKENS, room)
    eos_id = None if own.ignore_eos else tokenizer.eos_id
    announce(run, own, prompts, tokenizer)
    with reading(run.path):
        model = run.model(own.device, own.dtype or run.dtype)
    began = time.perf_counter()
    steps = generate(
        model, [prompt.ids for prompt in prompts], own.sampling, max_new_tokens=own.max_new_tokens, eos_id=eos_id
    )
    written = print_texts(prompts, [TextStream(tokenizer, prompt.ids) for prompt in prompts], steps, eos_id)
    took = time.perf_counter() - began
    log.info("%s tokens in %.1f s, %.1f tokens/s", f"{written:,}", took, written / took)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """With `prompts` read, and `sampling`, `device` and `dtype` (None: the run's) made. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        "titanlite generate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = "dump folder of a run, for its newest checkpoint that is whole; or one folder step-N"
    parser.add_argument("run", type=Path, metavar="RUN", help=text)
    text = "text to go on from; may be given several times"
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help=text)
    text = "the same, all that a file holds; -: stdin"
    parser.add_argument("--prompt-file", action="append", default=[], metavar="FILE", help=text)
    text = f"at most so many; default: {USUAL_NEW_TOKENS}, or what the model has positions for"
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=text)
    text = "below 1 likely tokens become likelier; 0: always the likeliest one; default: %(default)s"
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help=text)
    text = "draw among the K likeliest tokens; default: all"
    parser.add_argument("--top-k", type=int, metavar="K", help=text)
    text = "draw among the fewest likeliest tokens that together have probability P; default: %(default)s, all"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn; default: %(default)s")
    text = "write on where a document ends, and show the token that ends it"
    parser.add_argument("--ignore-eos", action="store_true", help=text)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: cuda if there is")
    text = "of weights and arithmetic; default: as the run keeps its weights"
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help=text)
    text = "tokenizer.json or its folder; default: the run's own"
    parser.add_argument("--tokenizer", metavar="PATH", help=text)
    own = parser.parse_args(argv)
    own.prompts, problems = read_prompts(own.prompt, own.prompt_file)
    problems += check_arguments(own)
    if problems:
        raise ConfigError(problems)
    own.sampling = Sampling(own.temperature, own.top_k, own.top_p, own.seed)
    with_gpu = torch.cuda.is_available() if own.device == "auto" else own.device == "cuda"
    own.device = torch.device("cuda", 0) if with_gpu else torch.device("cpu")
    own.dtype = DTYPES.get(own.dtype)
    return own


def check_arguments(own: argparse.Namespace) -> list[Problem]:
    """What can be said without the run."""
    no_gpu = own.device == "cuda" and not torch.cuda.is_available()
    return [
        *require(
            own.max_new_tokens is None or own.max_new_tokens >= 1,
            "--max-new-tokens",
            own.max_new_tokens,
            "at least 1",
            f"leave it out for {USUAL_NEW_TOKENS}",
        ),
        *require(
            0 <= own.temperature < math.inf,
            "--temperature",
            own.temperature,
            "0 or more, and finite",
            "0 for the likeliest tokens, about 0.8 for varied ones",
        ),
        *require(
            own.top_k is None or own.top_k >= 1, "--top-k", own.top_k, "at least 1", "leave it out to draw among all"
        ),
        *require(0 < own.top_p <= 1, "--top-p", own.top_p, "above 0 and at most 1", "1 to draw among all"),
        *require(0 <= own.seed < 2**63, "--seed", own.seed, "from 0 to 2^63 - 1", "any such number is as good"),
        *require(not no_gpu, "--device", "cuda", "a GPU that torch can use", "leave it out, or write cpu"),
    ]


def find_tokenizer(run: SavedRun, path: str | None) -> Tokenizer:
    """The one at `path`; None: the run's own. Raises UserError where there is none, or the model has no room for it."""
    if path is None:
        own = run.tokenizer()
        if own is None:
            why = "was trained on tokens" if run.manifest.facts["tokenizer"] is None else "has lost its tokenizer"
            raise ConfigError([Problem("--tokenizer", None, f"needed: {run.path} {why}", "write its tokenizer's path")])
        run.require_room(own, None)
        return own
    return run.tokenizer_at(path)


def announce(run: SavedRun, own: argparse.Namespace, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
    """Log what is about to write, and what to expect of it."""
    dtype = str(own.dtype or run.dtype).removeprefix("torch.")
    log.info("%s: %s, %s on %s", run.path, run.family.name, dtype, own.device)
    if tokenizer.eos_id is None:
        log.warning("the tokenizer names no EOS: each text ends after --max-new-tokens = %d", own.max_new_tokens)
    longest = max(len(prompt.ids) for prompt in prompts) + own.max_new_tokens
    trained = run.config.training.seq_len
    if longest > trained:
        log.warning("the run saw %d tokens at once: what is written after as many is guesswork", trained)


if __name__ == "__main__":
    run_command(main)
