"""Bad configurations: the key, rule and remedy of each kind, and that all problems are reported together."""

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.configuration import parse_config
from tests.seeds import seeds
from titanlite.config.load import load_config
from titanlite.config.values import full_keys
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import ConfigError, Problem


def problems_of(argv: list[str], world_size: int = 1, device_type: str = "cpu") -> list[Problem]:
    """The problems of a configuration; [] if it is valid."""
    try:
        load_config(argv, world_size=world_size, device_type=device_type)
    except ConfigError as error:
        return list(error.problems)
    return []


@dataclass(frozen=True)
class Bad:
    """One bad setting, given as `argv` or as the file content `toml`, and expected parts of rule and remedy."""

    key: str
    rule: str
    remedy: str
    argv: str = ""
    toml: str = ""
    world_size: int = 1

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    def __str__(self) -> str:
        return (self.argv or self.toml).replace("\n", " ")[:60]


STAGE = "--training.stages.0."
BATCHES = "--training.stages.1.from_step 6 --training.stages.1.global_batch_size 32"
DEEP = "--parallelism.pp 8 --training.global_batch_size 16"
MOE = "--model.family qwen3_moe"
TP = "--parallelism.tp"
MICRO = "--parallelism.pp 2 --parallelism.pp_microbatch_size"
SPLIT = "--parallelism.pp 2 --parallelism.pp_split="
SPLIT3 = "--parallelism.pp 3 --parallelism.pp_split="
TOKENS = Path(__file__).parents[2] / "golden" / "tokens.npy"
LEVELS = 5000
LOOK_ALIKES = [
    Bad("job.config_file", "valid TOML", f"{name} at {place}", toml=toml)
    for toml, name, place in (
        ("\n[job]\ndump_folder = “x”", "LEFT DOUBLE QUOTATION MARK (U+201C)", 'line 3, column 15: type "'),
        ("job.dump_folder = \u2018x\u2019", "LEFT SINGLE QUOTATION MARK (U+2018)", "line 1, column 19: type '"),
        ('job.dump_folder = "x”', "RIGHT DOUBLE QUOTATION MARK (U+201D)", 'line 1, column 21: type "'),
        ('data.sources = ["“”, "b"]', "RIGHT DOUBLE QUOTATION MARK (U+201D)", 'line 1, column 19: type "'),
        ("training.steps\xa0= 5", "NO-BREAK SPACE (U+00A0)", "line 1, column 15: type a space"),
        ("optimizer.lr = 1e\u20134  # “lr”", "EN DASH (U+2013)", "line 1, column 18: type -"),
        ("optimizer.lr = \u22121", "MINUS SIGN (U+2212)", "line 1, column 16: type -"),
        ("training.st\u200beps = 5", "ZERO WIDTH SPACE (U+200B)", "line 1, column 12: remove it"),
        ("training.steps = 5\n\ufeff[job]", "ZERO WIDTH NO-BREAK SPACE (U+FEFF)", "line 2, column 1: remove it"),
        ("training.steps \uff1d 5", "FULLWIDTH EQUALS SIGN (U+FF1D)", "line 1, column 16: type ="),
    )
]
LONG = 300 * "d"
EQUAL = "--training.bit_equal true --training.local_batch_size"
GROUP = '[[optimizer.groups]]\nparameters = ["output.weight"]\n'
ONE_GROUP = '--optimizer.groups.0.parameters=["output.weight"]'
VALID = "--validation.enable true --validation.sources.0."


BAD = [
    # The command line.
    Bad("argument '60'", "every argument", "write --section.key VALUE", "--training.steps 50 60"),
    Bad("job.config_file", "a readable TOML file", "give the path", "nowhere.toml"),
    Bad("job.config_file", "a readable TOML file", "did you mean quickstart", "quikstart"),
    Bad("argument '-training.steps'", "every argument", "write --training.steps", "-training.steps 5"),
    Bad("argument '—training.steps=5'", "every argument", "write --training.steps=5", "—training.steps=5"),
    Bad("optimizer.lr", "a number", "write 0.0001", "--optimizer.lr 1e\u20134"),
    Bad("training.steps", "an integer", "write 5", "--training.steps=“5”"),
    Bad("argument 'training.steps=5'", "every argument", "write --training.steps=5", "training.steps=5"),
    Bad("argument 'y'", "every argument", '["a", "b"]', '--optimizer.weight_decay_skip ["x"] y'),
    Bad("training.steps", "a value", "--training.steps 1000", "--training.steps"),
    Bad("training", "one of its keys", "write --training.KEY VALUE, for example --training.steps 1000", "--training"),
    Bad("training", "one of its keys", "for example --training.steps 1000", "--training 3"),
    Bad("data.sources.0.path", "a value", "--data.sources.0.path TEXT", "--data.sources.0.path"),
    Bad("training.steps", "given once", "--training.steps=5 or --training.steps=6",
        "--training.steps 5 --training.steps 6"),
    Bad("data.sources", "one key of one table", "--data.sources.0.KEY", "--data.sources []"),
    Bad("data.sources.path", "one key of one table", "--data.sources.0.path VALUE", "--data.sources.path x"),
    Bad("data.sources.2", "one key of one table", "--data.sources.2.KEY VALUE", "--data.sources.2 x"),
    # Stages of the training.
    Bad("training.stages.0.from_step", "given, or from_tokens", "write the first step", f"{STAGE}seq_len 64"),
    Bad("training.stages.0.from_step", "not both", "leave one of them out",
        f"{STAGE}seq_len 64 {STAGE}from_step 4 {STAGE}from_tokens 100"),
    Bad("training.stages.0.from_step", "the start of a change", "remove the table", f"{STAGE}from_step 4"),
    Bad("training.stages.0.from_step", "-1 or at least 2", "[training] has those before",
        f"{STAGE}from_step 1 {STAGE}seq_len 64"),
    Bad("training.stages.1.from_step", "later than the stage before, which begins at step 4", "order the tables",
        toml="[[training.stages]]\nfrom_step = 4\nseq_len = 64\n[[training.stages]]\nfrom_step = 4\nseq_len = 32"),
    Bad("training.stages.0.weights", "a table of numbers by name", "write {", f"{STAGE}from_step 4 {STAGE}weights 3"),
    Bad("training.stages.0.weights", "a number", "for example 1.0",
        toml="[[training.stages]]\nfrom_step = 4\nweights = {a = 'x', b = 1}\n"
        "[[data.sources]]\nkind = 'python-stdlib'\nname = 'a'\nweight = 1\n"
        "[[data.sources]]\nkind = 'python-stdlib'\nname = 'b'\nweight = 0"),
    Bad("training.stages.0.weights", "a weight for each source by its name: python-stdlib", "remove b, and add",
        toml="[[training.stages]]\nfrom_step = 4\nweights = {b = 1}"),
    Bad("training.stages.0.weights", "at least one weight above 0", "write its share",
        toml="[[training.stages]]\nfrom_step = 4\nweights = {'python-stdlib (train)' = 0}"),
    Bad("data.sources.0.weight", "above 0, unless", "write its share", "--data.sources.0.weight 0"),
    # the length of the second stage stays in the third
    Bad("training.stages.0.seq_len", "divisible by parallelism.tp = 2", "set training.stages.0.seq_len = 98 or 100",
        f"{TP} 2 {STAGE}from_step 4 {STAGE}seq_len 99 {BATCHES}", world_size=2),
    Bad("training.stages.0.seq_len", "at most model.max_seq_len", "", f"{STAGE}from_step 4 {STAGE}seq_len 9999999"),
    Bad("training.stages.0.seq_len", "divisible by parallelism.cp x tp = 2", "training.stages.0.seq_len = 98 or 100",
        f"--parallelism.cp 2 {STAGE}from_step 4 {STAGE}seq_len 99 {BATCHES}", world_size=2),
    Bad("training.stages.0.seq_len", 'training.seq_len = 256 with data.packing = "best_fit"', "concatenate",
        f"--data.packing best_fit --training.seq_len 256 {STAGE}from_step 4 {STAGE}seq_len 64"),
    Bad("training.stages.0.global_batch_size", "divisible by training.local_batch_size = 4",
        "set training.stages.0.global_batch_size = 8 or 12",
        f"--training.bit_equal --training.local_batch_size 4 --data.num_streams 8 {STAGE}from_step 4 "
        f"{STAGE}global_batch_size 9"),
    Bad("parallelism.dp_replicate", "world size 1 must be divisible", "use 2 processes",
        f"--parallelism.dp_replicate 2 {STAGE}from_step 4 {STAGE}seq_len 64 "
        "--training.stages.1.from_tokens 500000 --training.stages.1.seq_len 32"),
    Bad("parallelism.layout", "given by the degrees with training.stages", "set the degrees",
        f"--parallelism.layout auto --training.global_batch_size 8 {STAGE}from_step 4 {STAGE}seq_len 64"),
    Bad("training.stages.0.rope_beta_fast", "only with a family with model.rope_beta_fast", "leave it out",
        f"{STAGE}from_step 4 {STAGE}rope_beta_fast 30"),
    Bad("training.stages.0.rope_scaling_factor", "-1 or at least 1", "leave it out",
        f"{STAGE}from_step 4 {STAGE}seq_len 64 {STAGE}rope_scaling_factor 0.5"),
    # Names.
    Bad("steps", "a key of a section", "training.steps", "--steps 5"),
    Bad("steps", "a key of a section", "training.steps", toml="steps = 5"),
    Bad("training.stesp", "a key of [training]", "training.steps?", "--training.stesp 5"),
    Bad("training.stesp", "a key of [training]", "training.steps?", toml="training.stesp = 5"),
    Bad("training.Seq_Len", "a key of [training]", "training.seq_len?", "--training.Seq-Len 5"),
    Bad("training.lr", "a key of [training]", "optimizer.lr?", "--training.lr 1"),
    Bad("training.lr", "a key of [training]", "optimizer.lr?", toml="training.lr = 1"),
    Bad("training.decay_steps", "a key of [training]", "lr_schedule.decay_steps?", toml="training.decay_steps = 1"),
    Bad("training.xyz", "a key of [training]", "one of its keys: steps, tokens", "--training.xyz 1"),
    Bad("training.steps.x", "a key of [training]", "training.steps", "--training.steps.x 1"),
    Bad("training.batch_size", "a key of [training]", "training.local_batch_size?", toml="training.batch_size = 8"),
    Bad("parallelism.data_parallel_shard_degree", "a key of [parallelism]", "one of its keys: layout",
        "--parallelism.data_parallel_shard_degree 1"),
    Bad("parallelism.tensor_parallel_degree", "a key of [parallelism]", "one of its keys: layout",
        toml="parallelism.tensor_parallel_degree = 1"),
    Bad("optimiser", "a section", "[optimizer]?", toml="[optimiser]\nlr = 1\neps = 1"),
    Bad("unknown", "a section", "the sections: job, model", toml="[unknown]\nx = 1"),
    Bad("optimiser.lr", "a key of a section", "optimizer.lr?", "--optimiser.lr 1"),
    Bad("xyz.abc", "a key of a section", "the sections: job, model", "--xyz.abc 1"),
    Bad("model.dims", "a key of [model]", "model.dim?", "--model.dims 64"),
    Bad("model.dims", "a key of [model]", "model.dim?", toml="model.dims = 64"),
    Bad("model.overrides", "a key of [model]", "one of its keys: family", toml="model.overrides = {dim = 64}"),
    Bad("data.sources.0.pth", "[[data.sources]] table", "data.sources.0.path?", "--data.sources.0.pth x"),
    Bad("data.sources.0.pth", "[[data.sources]] table", "data.sources.0.path?", toml='[[data.sources]]\npth = "x"'),
    Bad("data.sources.2.path", "(1 table so far)", "--data.sources.1.path", "--data.sources.2.path x"),
    Bad("data.sources.x.path", "an index from 0", "--data.sources.1.path", "--data.sources.x.path x"),
    Bad("data.sources.-1.path", "an index from 0", "--data.sources.1.path", "--data.sources.-1.path x"),
    Bad("data.sources.00.path", "an index from 0", "--data.sources.1.path", "--data.sources.00.path x"),
    Bad("data.path", "a key of [data]", "did you mean data.sources.0.path?", toml='data.path = "x"'),
    # Shapes of tables.
    Bad("training", "a table of keys", "write [training]", toml="training = 5"),
    Bad("job", "a table of keys", "write [job]", toml="job = 5"),
    Bad("lr_schedule.decay_steps", "a number of steps", '"5 %"', toml="lr_schedule.decay_steps = true"),
    Bad("training", "a table of keys", "write [training]", toml="[[training]]\nsteps = 5"),
    Bad("data.sources", "an array of tables", "[[data.sources]]", toml='[data.sources]\nkind = "text"'),
    Bad("data.sources", "an array of tables", "[[data.sources]]", toml='data.sources = ["text"]'),
    # Types.
    Bad("training.steps", "an integer", "write 5 without quotes", toml='training.steps = "5"'),
    Bad("training.steps", "an integer", "for example 1000", toml="training.steps = true"),
    Bad("training.steps", "an integer", "write 5", toml="training.steps = 5.0"),
    Bad("training.steps", "an integer", "for example 1000", "--training.steps 5.5"),
    Bad("training.steps", "an integer", "for example 1000", "--training.steps many"),
    Bad("training.steps", "an integer", "for example 1000", "--training.steps="),
    Bad("training.steps", "an integer", "for example 1000", toml="training.steps = [5]"),
    # Nested deeply, which must not end in a RecursionError.
    Bad("job.config_file", "valid TOML", "too deep", toml=f"training.steps = {'[' * LEVELS}{']' * LEVELS}"),
    Bad("job.config_file", "valid TOML", "too deep", toml=f"training.steps = {'{a = ' * LEVELS}1{'}' * LEVELS}"),
    Bad("job.config_file", "valid TOML", "fix the file", toml=f"[training{'.a' * LEVELS}]\nb = 1"),
    Bad("job.config_file", "valid TOML", "fix the file", toml=f"[[data.sources]]\nkind{'.a' * LEVELS} = 1"),
    Bad("job.config_file", "more than 64 levels", "fix the file", toml=f"training.steps = {'[' * 70}{']' * 70}"),
    Bad("training.steps", "an integer", "for example 1000", f"--training.steps {{x{'.a' * LEVELS}=1}}"),
    # Names and paths that no file system can have.
    Bad("job.config_file", "file name too long", "the path of a TOML file", f"{LONG}/x.toml"),
    Bad("job.dump_folder", "at most 255 bytes", "a shorter path", f"--job.dump_folder {LONG}"),
    Bad("job.dump_folder", "at most 3,800", "a shorter path", f"--job.dump_folder {'/folder' * 600}"),
    Bad("checkpoint.folder", "at most 255 bytes", "a shorter path", f"--checkpoint.folder {LONG}"),
    Bad("checkpoint.initial_load_path", "255 bytes", "a shorter", f"--checkpoint.initial_load_path hf:a/{LONG}"),
    Bad("tokenizer.path", "at most 255 bytes", "a shorter path", f"--tokenizer.path {LONG}/tokenizer.json"),
    Bad("data.sources.0.path", "255 bytes", "a shorter path",
        f"--data.sources.0.kind text --data.sources.0.path {LONG}/a.txt --tokenizer.path /"),
    # training.local_batch_size = -1
    Bad("training.local_batch_size", "-1 or at least 1", "-1: as many as fit", "--training.local_batch_size -2"),
    Bad("training.global_batch_size", "must not depend on a device", "set training.global_batch_size",
        "--training.local_batch_size -1"),
    # Bit-equal training.
    Bad("training.dtype", "float32 or bfloat16 with training.bit_equal", "leave it out",
        f"{EQUAL} 1 --training.dtype float64 --training.mixed_precision_param float32"),
    Bad("training.mixed_precision_param", "float32 or bfloat16", "leave it out",
        f"{EQUAL} 1 --training.mixed_precision_param float64"),
    Bad("training.mixed_precision_reduce", "float64 with training.bit_equal", "leave it out",
        f"{EQUAL} 1 --training.mixed_precision_reduce float32"),
    Bad("training.local_batch_size", "computes with exactly this number", "set it",
        f"{EQUAL}=-1 --training.global_batch_size 8"),
    Bad("parallelism.layout", "given by the degrees", "see titanlite plan",
        f"{EQUAL} 1 --training.global_batch_size 8 --parallelism.layout auto"),
    Bad("training.global_batch_size", "divisible by training.local_batch_size = 3", "= 6 or 9",
        f"{EQUAL} 3 --training.global_batch_size 8 --data.num_streams 6"),
    Bad("training.global_batch_size", "divisible by parallelism.pp_microbatch_size = 3", "= 6 or 9", world_size=2,
        argv=f"{EQUAL} 1 --training.global_batch_size 8 --data.num_streams 6 {MICRO} 3"),
    Bad("training.global_batch_size", "at most 4,096 with", "raise training.local_batch_size",
        f"{EQUAL} 1 --training.global_batch_size 4097"),
    Bad("data.num_streams", "divisible by training.local_batch_size = 2", "= 6 or 8",
        f"{EQUAL} 2 --training.global_batch_size 8 --data.num_streams 7"),
    Bad("job.dump_folder", "a path on a disk", "write a path", "--job.dump_folder s3://bucket/run"),
    Bad("storage.ca_file", "a file of certificates", "a PEM file", "--storage.ca_file no.pem"),
    Bad("storage.endpoint", "a URL", "http://HOST:PORT, or https://HOST", "--storage.endpoint localhost:9 "
        "--checkpoint.enable --checkpoint.folder s3://nobucket/x"),
    Bad("checkpoint.folder", "a place that all processes share", "write s3://BUCKET/NAME", world_size=2,
        argv="--checkpoint.folder memory://bucket/run"),
    Bad("data.num_streams", "at least 2 x 4 data ranks = 8", "or use fewer ranks", world_size=4,
        argv=f"{EQUAL} 2 --training.global_batch_size 8 --data.num_streams 6"),
    Bad("training.local_batch_size", "parallelism.pp_microbatch_size", "set training.local_batch_size",
        "--training.local_batch_size -1 --training.global_batch_size 8 --parallelism.pp 2", world_size=2),
    Bad("memory.check", 'one of "refuse", "warn", "off"', "did you mean", "--memory.check refused"),
    Bad("training.steps", "an integer", "for example 1000", toml="training.steps = {value = 5}"),
    Bad("training.steps", "an integer", "for example 1000", toml="training.steps = 2026-01-01"),
    Bad("training.steps", "to 2^63 - 1", "in this range", toml="training.steps = 9223372036854775808"),
    Bad("samples.temperature", "to 2^63 - 1", "in this range", toml="samples.temperature = 9223372036854775808"),
    Bad("samples.prompts", "a string", '"text"', toml="samples.prompts = [{a = 1}]"),
    Bad("faults.spike_factor", "a number", "a number", toml="faults.spike_factor = false"),
    Bad("training.tokens", "an integer", "write -1", toml="training.tokens = -1.0"),
    Bad("job", "a table of keys", "write [job]", toml="[[job]]\ndump_folder = 'a'"),
    Bad("job.plugins", "an array", '["my_plugin"]', toml="job.plugins = 'my_plugin'\nmodel.family = 'of_my_plugin'"),
    Bad("job.plugins", "a string", '"5"', toml="job.plugins = [5]\nmodel.family = 'of_my_plugin'"),
    Bad("optimizer.eps", "a number", "5.0 without quotes", "--optimizer.eps=5\n"),
    Bad("data.shuffle", "true or false", "write false", toml='data.shuffle = "false"'),
    Bad("data.shuffle", "true or false", "write true", "--data.shuffle True"),
    Bad("data.shuffle", "true or false", "write false", toml="data.shuffle = 0"),
    Bad("data.shuffle", "true or false", "for example true", "--data.shuffle maybe"),
    Bad("model.n_layers", "to 10,000", "in this range", "--model.n_layers 1000000000"),
    Bad("data.num_streams", "from 1 to 1,048,576", "leave it out", "--data.num_streams 1000000000"),
    Bad("training.global_batch_size", "from 1 to 1,048,576", "it counts sequences: divide a number of tokens by",
        "--training.global_batch_size 4194304"),
    Bad("optimizer.eps", "the range of float32", "inside this range", "--optimizer.eps 1e-50"),
    Bad("optimizer.eps", "the range of float32", "inside", "--optimizer.eps 1e-50 --training.dtype bfloat16"),
    Bad("optimizer.eps", "the range of float64", "inside", "--optimizer.eps 1e-320 --training.dtype float64"),
    Bad("optimizer.lr", "the range of float32", "inside this range", "--optimizer.lr 1e39"),
    Bad("optimizer.weight_decay", "the range of float32", "inside", "--optimizer.weight_decay 1e-40"),
    Bad("optimizer.beta2", "below 1 also in float32", "at most 0.99999988", "--optimizer.beta2 0.99999999"),
    Bad("optimizer.momentum", "below 1 also in float32", "", "--optimizer.name Muon --optimizer.momentum 0.99999999"),
    Bad("optimizer.groups.0.beta2", "below 1 also in float32", "",
        toml='[[optimizer.groups]]\nparameters = ["output.weight"]\nbeta2 = 0.99999999'),
    Bad("optimizer.groups.0.parameters", "the name of a parameter", 'did you mean "output.weight"?',
        '--optimizer.groups.0.parameters ["output.wieght"]'),
    Bad("optimizer.qk_clip", "normalizes queries and keys", "leave it out",
        "--optimizer.qk_clip 100 --model.family qwen3"),
    Bad("optimizer.qk_clip", "whose attention is its own", "leave it out",
        "--optimizer.qk_clip 100 --model.family deepseek_v3"),
    Bad("optimizer.qk_clip", "0 with capped scores, which model.score_cap bounds", "model.score_cap = 0.0",
        "--optimizer.qk_clip 100 --model.family gemma2"),
    Bad("optimizer.groups.0.lr", "a key of one [[optimizer.groups]]", "lr_factor",
        toml='[[optimizer.groups]]\nparameters = ["output.weight"]\nlr = 0.1'),
    Bad("optimizer.groups.0.optimizer", "one of", "", f"{ONE_GROUP} --optimizer.groups.0.optimizer=Adam"),
    Bad("optimizer.groups.0.betas", "a key of one", "", f"{ONE_GROUP} --optimizer.groups.0.betas=0.9"),
    Bad("optimizer.newton_schulz_coefficients", "", "", '--optimizer.newton_schulz_coefficients=["a"]'),
    Bad("training.max_norm", "the range of float32", "inside this range", "--training.max_norm 1e-39"),
    Bad("model.norm_eps", "the range of float32", "inside this range", "--model.norm_eps 1e-46"),
    Bad("optimizer.lr", "a number", "write 0.001 without quotes", toml='optimizer.lr = "1e-3"'),
    Bad("optimizer.lr", "a number", "write 0.001", "--optimizer.lr .001"),
    Bad("optimizer.lr", "a number", "for example 0.0003", toml="optimizer.lr = false"),
    Bad("optimizer.lr", "a finite number", "for example 0.0003", toml="optimizer.lr = nan"),
    Bad("optimizer.lr", "a finite number", "for example 0.0003", "--optimizer.lr nan"),
    Bad("training.max_norm", "a finite number", "for example 1.0", "--training.max_norm inf"),
    Bad("optimizer.lr", "a finite number", "for example 0.0003", "--optimizer.lr 1e999"),
    Bad("optimizer.lr", "a number", "for example 0.0003", "--optimizer.lr 1#2"),
    Bad("optimizer.name", 'one of "AdamW", "Muon"', 'did you mean "AdamW"?', toml='optimizer.name = "adamw"'),
    Bad("optimizer.name", 'one of "AdamW", "Muon"', "use one of these", "--optimizer.name Shampoo"),
    Bad("training.dtype", 'one of "float32"', 'did you mean "bfloat16"?', "--training.dtype bf16"),
    Bad("training.dtype", 'one of "float32"', "use one of these", toml="training.dtype = 32"),
    Bad("data.sources.0.kind", 'one of "text"', 'did you mean "jsonl"?', "--data.sources.0.kind json"),
    Bad("data.sources.0.path", "a string", 'write "5"', toml='[[data.sources]]\nkind = "tokens"\npath = 5'),
    Bad("job.description", "a string", 'write "5"', toml="job.description = 5"),
    Bad("job.description", "a string", 'for example ""', toml="job.description = []"),
    Bad("job.description", "without NUL", "remove", toml='job.description = "a\\u0000b"'),
    Bad("job.description", "valid Unicode", "remove", "--job.description \udcff"),
    Bad("optimizer.weight_decay_skip", "an array", 'write ["*norm*"]', "--optimizer.weight_decay_skip *norm*"),
    Bad("optimizer.weight_decay_skip", "a string", 'write "1"', toml='optimizer.weight_decay_skip = ["a", 1]'),
    Bad("model.family", 'one of "llama3"', 'did you mean "llama3"?', toml='model.family = "llama"\nmodel.dim = 64'),
    Bad("model.family", 'one of "llama3"', "use one of these", "--model.family gpt2 --model.n_embd 64"),
    Bad("model.family", 'one of "llama3"', "use one of these", toml="model.family = 3"),
    Bad("model.rope_low_freq_factor", "a key of [model]", "", "--model.family qwen3 --model.rope_low_freq_factor 8"),
    Bad("model.rope_scaling_factor", "1 or more", "1.0 for no scaling",
        "--model.family qwen3 --model.rope_scaling_factor 0.5"),
    Bad("model.rope_beta_slow", "below model.rope_beta_fast = 32.0", "1.0 and 32.0",
        "--model.family qwen3 --model.rope_beta_slow 32"),
    Bad("model.head_dim", "even, since rotary", "128", "--model.family qwen3 --model.head_dim 63"),
    Bad("model.flavor", 'one of "debug", "1B"', 'did you mean "8B"?', "--model.flavor 8b"),
    Bad("model.dim", "an integer", "write 64", toml="model.dim = 64.0"),
    Bad("model.tie_embeddings", "true or false", "write true", "--model.tie_embeddings 1"),
    # Ranges, and rules across keys.
    Bad("training.steps", "at least 1", "positive", "--training.steps 0"),
    Bad("training.seq_len", "at least 1", "positive", toml="training.seq_len = 0"),
    Bad("training.local_batch_size", "at least 1", "positive", "--training.local_batch_size 0"),
    Bad("training.global_batch_size", "-1 or from 1", "-1", "--training.global_batch_size 0"),
    Bad("optimizer.lr", "above 0", "3e-4", "--optimizer.lr -1"),
    Bad("optimizer.lr", "above 0", "3e-4", toml="optimizer.lr = 0"),
    Bad("optimizer.beta1", "below 1", "0.9", "--optimizer.beta1 1"),
    Bad("optimizer.beta2", "below 1", "0.95", "--optimizer.beta2 -0.5"),
    Bad("optimizer.eps", "above 0", "1e-8", "--optimizer.eps 0"),
    Bad("optimizer.weight_decay", "0 or more", "0", "--optimizer.weight_decay -0.1"),
    Bad("optimizer.ema_decay", "at least 0 and below 1", "0 keeps no average", "--optimizer.ema_decay 1.0"),
    Bad("lr_schedule.warmup_steps", "0 or more", "0", "--lr_schedule.warmup_steps -1"),
    Bad("lr_schedule.warmup_steps", "a number of steps", "100", toml="lr_schedule.warmup_steps = true"),
    Bad("training.tokens", "-1 or at least 1", "leave it out", "--training.tokens 0"),
    Bad("lr_schedule.warmup_steps", "up to 100", '"5 %"', toml="lr_schedule.warmup_steps = '200 %'"),
    Bad("lr_schedule.warmup_steps", '"N tokens"', "2_000_000 tokens", toml="lr_schedule.warmup_steps = '5 epochs'"),
    Bad("lr_schedule.warmup_steps", "a number of steps", "100", toml="lr_schedule.warmup_steps = 0.01"),
    Bad("lr_schedule.decay_steps", "at least 1", "leave it out", toml="lr_schedule.decay_steps = '0 tokens'"),
    Bad("lr_schedule.final_decay_steps", "at least 1", "leave it out", toml="lr_schedule.final_decay_steps = '0 %'"),
    Bad("lr_schedule.decay_steps", "-1 or at least 1", "leave it out", "--lr_schedule.decay_steps 0"),
    Bad("lr_schedule.decay_ratio", "at most 1", "0.2", "--lr_schedule.decay_ratio 1.5"),
    Bad("lr_schedule.decay_ratio", "only one of", "leave out",
        "--lr_schedule.decay_ratio 0.5 --lr_schedule.decay_steps 5"),
    Bad("lr_schedule.min_lr_factor", "from 0 to 1", "0.1", "--lr_schedule.min_lr_factor 2"),
    Bad("parallelism.dp_replicate", "at least 1", "1", "--parallelism.dp_replicate 0"),
    Bad("parallelism.cp", "divides n_heads / tp = 4", "parallelism.cp = 2",
        "--parallelism.cp 3 --training.seq_len 30 --model.n_heads 4 --model.n_kv_heads 2 --model.dim 64", world_size=3),
    Bad("training.seq_len", "divisible by parallelism.cp x tp = 2", "30",
        "--parallelism.cp 2 --training.seq_len 31", world_size=2),
    Bad("training.seq_len", "divisible by 2 x parallelism.cp, and by cp x tp: 6", "24", world_size=3,
        argv="--parallelism.cp 3 --parallelism.context_parallel gather --training.seq_len 27 --model.n_heads 4 "
             "--model.n_kv_heads 2 --model.dim 64"),
    Bad("parallelism.dp_shard", "-1 or at least 1", "1", "--parallelism.dp_shard 0"),
    Bad("parallelism.ep", "at least 1", "1", "--parallelism.ep 0"),
    Bad("parallelism.ep", "1 for a model without experts", "ep = 1", "--parallelism.ep 2", world_size=2),
    *(
        Bad(key, "names that a plugin registers", "add the plugin", f'--{key} ["mine"]')
        for key in ("loss.terms", "metrics.statistics")
    ),
    Bad("parallelism.ep", "divides dp_shard x cp = 2", "ep = 2", f"{MOE} --parallelism.ep 4", world_size=2),
    Bad("parallelism.ep", "and model.n_experts = 8", "ep = 1", f"{MOE} --parallelism.ep 3", world_size=3),
    Bad("parallelism.ep", "cp = 1 and model.n_experts = 8", "ep = 1", f"{MOE} --parallelism.ep 3"),
    Bad("model.bias_rate", "at least 0 and below 1", "0.001", f"{MOE} --model.bias_rate 1.0"),
    Bad("parallelism.tp", "at least 1", "1", "--parallelism.tp 0"),
    Bad("parallelism.pp", "at least 1", "1", "--parallelism.pp -2"),
    Bad("model.n_kv_heads", "parallelism.tp = 4", "n_kv_heads = 4", f"{TP} 4 --model.n_kv_heads 2", world_size=4),
    Bad("model.ffn_dim", "parallelism.tp = 4", "772", f"{TP} 4 --model.ffn_dim 770", world_size=4),
    Bad("training.seq_len", "parallelism.tp = 2", "256", f"{TP} 2 --training.seq_len 257", world_size=2),
    Bad("parallelism.pp", "round its own part of the gradient of tok_embeddings.weight", "tie_embeddings = false",
        "--parallelism.pp 2 --model.tie_embeddings true --training.bit_equal true", world_size=2),
    Bad("parallelism.pp", "16 stages", "fewer", f"{DEEP} --parallelism.pp_schedule LoopedBFS", world_size=8),
    Bad("parallelism.pp_schedule", "one of", "1F1B", "--parallelism.pp_schedule 1f1b"),
    Bad("parallelism.pp_microbatch_size", "at least 1", "1", f"{MICRO} 0", world_size=2),
    Bad("parallelism.pp_split", "layers.9", "layers.0", f"{SPLIT}[\"layers.9\"]", world_size=2),
    Bad("parallelism.pp_split", "1 different names", "leave", f"{SPLIT}[\"layers.1\",\"layers.2\"]", world_size=2),
    Bad("parallelism.pp_split", "output cannot", "layers.0", f"{SPLIT}[\"output\"]", world_size=2),
    *(
        Bad("parallelism.pp_split", "2 different names", "leave", argv=f"{SPLIT3}{names}", world_size=3)
        for names in ('["layers.1"]', '["norm","layers.1"]', '["norm","norm"]')
    ),
    Bad("activation_checkpoint.mode", "one of", "full", "--activation_checkpoint.mode ful"),
    Bad("float8.recipe", "a rank has full blocks of 32 elements: layers.0.feed_forward.w1 has 100 outputs (the next "
        "size is 128), and 17 more sizes do not fit", 'float8.exclude = ["layers.*.feed_forward.w1", "layers.*.feed_',
        "--float8.recipe mxfp8 --model.ffn_dim 100"),
    Bad("float8.recipe", "layers.0.attention.wq has 256 outputs for tp = 4 ranks (the next size is 512)",
        "those of heads are model.n_heads or n_kv_heads x", "--float8.recipe blockwise --parallelism.tp 4",
        world_size=4),
    Bad("float8.scale", "powers of two", "blockwise", "--float8.recipe mxfp8 --float8.scale float32"),
    Bad("float8.exclude", "such as layers.0.attention.wq; output is none", "leave it out",
        '--float8.recipe rowwise --float8.exclude ["output"]'),
    Bad("float8.exclude", "leaves at least one layer", 'recipe = "none"',
        '--float8.recipe rowwise --float8.exclude ["layers.*"]'),
    Bad("training.seq_len", "divisible by 256: with float8.recipe = 'blockwise'", "training.seq_len = 256 or 512",
        "--float8.recipe blockwise --training.seq_len 384 --parallelism.cp 2", world_size=2),
    Bad("training.seq_len", "divisible by 128: with float8.recipe = 'mxfp8'", "training.seq_len = 128 or 256",
        "--float8.recipe mxfp8 --training.seq_len 192 --parallelism.cp 2 --parallelism.context_parallel gather",
        world_size=2),
    Bad("compile.backend", "one of", "inductor", "--compile.enable true --compile.backend inductr"),
    Bad("parallelism.dp_shard", "world size", "dp_shard", "--parallelism.dp_shard 4", world_size=2),
    Bad("parallelism.dp_replicate", "world size", "NGPU", "--parallelism.dp_replicate 3", world_size=2),
    Bad("debug.seed", "from 0", "any integer", "--debug.seed -1"),
    Bad("comm.init_timeout_s", "from 1 to 604,800", "leave it out", "--comm.init_timeout_s 0"),
    Bad("comm.train_timeout_s", "from 1 to 604,800", "leave it out", "--comm.train_timeout_s -5"),
    Bad("metrics.log_freq", "at least 1", "1 logs every step", "--metrics.log_freq 0"),
    Bad("model.dim", "2 x model.n_heads = 32", "224 or 256", "--model.dim 250"),
    Bad("model.n_kv_heads", "divides model.n_heads", "one of them", "--model.n_kv_heads 3"),
    Bad("model.vocab_size", "from 1 to", "", "--model.vocab_size 0"),
    Bad("training.seq_len", "max_seq_len", "shorten", "--model.max_seq_len 128 --training.seq_len 256"),
    Bad("data.num_streams", "-1 or from 1", "leave it out", "--data.num_streams 0"),
    Bad("data.num_streams", "dp_replicate x dp_shard = 4", "fewer", "--data.num_streams 3", world_size=4),
    Bad("data.num_streams", "-1 is training.global_batch_size = 3", "more streams",
        "--training.global_batch_size 3", world_size=4),
    Bad("data.max_piece_bytes", "at least", "leave it out", "--data.max_piece_bytes 0"),
    Bad("data.max_bad_rows", "0 or more", "0 stops at the first bad row", "--data.max_bad_rows -1"),
    Bad("data.seed", "from 0", "number from 0", "--data.seed -1"),
    Bad("data.on_bad_row", 'one of "error", "skip"', "use one of these", "--data.on_bad_row ignore"),
    Bad("data.sources", "at least one source", "[[data.sources]]", toml="data.sources = []"),
    Bad("data.sources.0.path", "only with kind", "leave it out", "--data.sources.0.path x"),
    Bad("data.sources.0.path", "matches files", "/none/x.npy",
        "--data.sources.0.kind tokens --data.sources.0.path /none/x.npy"),
    Bad("data.sources.0.path", "required for kind", "write the path", "--data.sources.0.kind tokens"),
    Bad("data.sources.0.document", 'one of "", "file"', 'did you mean "line"?', "--data.sources.0.document lines"),
    Bad("data.add_bos", "no BOS", "false", "--data.add_bos true"),
    Bad("tokenizer.path", "tokenizer.json", "/none/t.json", "--tokenizer.path /none/t.json"),
    Bad("tokenizer.chat_template", "Jinja", "/none/t.jinja", "--tokenizer.chat_template /none/t.jinja"),
    Bad("tokenizer.bos", "tokenizer.path", "leave it out", "--tokenizer.bos <s>"),
    Bad("model.vocab_size", "at least 257", "vocab_size = 4096", "--model.vocab_size 100"),
    Bad("validation.interval", "at least 1", "every step", "--validation.interval 0"),
    Bad("validation.steps", "-1 or at least 1", "leave it out", "--validation.steps 0"),
    Bad("validation.sources", "at least one source", "[[validation.sources]]", "--validation.enable true"),
    Bad("validation.sources.0.path", "required for kind", "write the path", f"{VALID}kind tokens"),
    Bad("validation.sources.0.path", "matches files", "/none/x",
        f"{VALID}kind tokens --validation.sources.0.path /none/x"),
    Bad("validation.sources.0.weight", "not valid for validation", "leave it out", f"{VALID}weight 2"),
    Bad("validation.sources.0.epochs", "not valid for validation", "leave it out", f"{VALID}epochs 2"),
    Bad("validation.sources.0.kind", 'one of "text"', 'did you mean "jsonl"?', "--validation.sources.0.kind json"),
    Bad("tokenizer.path", "data.sources are tokens", "the tokenizer that made the tokens",
        argv=f"--data.sources.0.kind tokens --data.sources.0.path {TOKENS} --validation.enable true "
        "--validation.sources.0.kind python-stdlib"),
    Bad("checkpoint.interval", "at least 1", "every step", "--checkpoint.interval 0"),
    Bad("checkpoint.keep_latest_k", "0 or more", "keeps all", "--checkpoint.keep_latest_k -1"),
    Bad("checkpoint.keep_every", "0 or more", "disables", "--checkpoint.keep_every -1"),
    Bad("checkpoint.load_step", "at least -1", "latest", "--checkpoint.load_step -2"),
    Bad("checkpoint.async_mode", "an accelerator", "async", "--checkpoint.async_mode async_with_pinned_mem"),
    Bad("parallelism.dp_shard", "-1 or at least 1", "axis off", "--parallelism.dp_shard -2"),
    Bad("optimizer.groups.0.lr_factor", "above 0", "", toml=f"{GROUP}lr_factor = 0.0"),
    Bad("optimizer.groups.0.weight_decay", "-1 or 0 or more", "", toml=f"{GROUP}weight_decay = -2.0"),
    Bad("profiling.active", "at least 1", "positive", "--profiling.active 0"),
    Bad("profiling.warmup", "0 or more", "no warm-up", "--profiling.warmup -1"),
    Bad("profiling.interval", "at least 1", "traces every", "--profiling.interval 0"),
    Bad("training.global_batch_size", "-1 or from 1", "-1:", "--training.global_batch_size -2"),
    Bad("samples.interval", "at least 1", "every step", "--samples.interval 0"),
    Bad("data.max_piece_bytes", "-1 or at least 16", "leave it out", "--data.max_piece_bytes 8"),
    # Outputs.
    Bad("job.dump_folder", "the path of a folder", '"outputs"', toml='job.dump_folder = ""'),
    Bad("job.dump_folder", "the path of a folder", '"outputs"', toml='job.dump_folder = "  "'),
    Bad("job.dump_folder", "home folder", "without ~", "--job.dump_folder ~nobodyhere/runs"),
    Bad("job.dump_folder", "a folder; ", "another job.dump_folder", "--job.dump_folder /dev/null"),
    Bad("job.dump_folder", "a folder; ", "another job.dump_folder", "--job.dump_folder /dev/null/runs/a"),
    # The file.
    Bad("job.config_file", "a key of [job]", "remove it", toml='job.config_file = "x.toml"'),
    Bad("job.config_file", "valid TOML", "line 2", toml="[training]\nsteps = \n"),
    Bad("job.config_file", "valid TOML", "fix the file", toml="training.steps = 1\ntraining.steps = 2"),
    Bad("job.config_file", "valid TOML", "fix the file", toml="training.steps = " + "9" * 5000),
    Bad("job.config_file", "valid TOML", "fix the file", toml="training.steps = " + "[" * 100_000),
    *LOOK_ALIKES,
    Bad("job.config_file", "a readable TOML file", "path of a TOML file", "--job.config_file /none/x.toml"),
    Bad("job.config_file", "the path of a TOML file", "path of a TOML file", "--job.config_file="),
    Bad("job.config_file", "(is a directory)", "path of a TOML file", "--job.config_file /"),
]  # fmt: skip


@pytest.mark.parametrize("section", sorted({bad.section for bad in BAD}))
def test_bad_setting_is_one_problem_with_key_rule_and_remedy(section: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    wrong = {}
    for bad in [bad for bad in BAD if bad.section == section]:
        argv = bad.argv.split(" ") if bad.argv else []
        if bad.toml:
            file.write_text(bad.toml)
            argv = ["--job.config_file", str(file)]
        found = problems_of(argv, bad.world_size)
        if [problem.key for problem in found] != [bad.key] or not (
            bad.rule in found[0].rule and bad.remedy in found[0].remedy
        ):
            wrong[str(bad)] = found
    assert wrong == {}


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes('job.description = "caf\u00e9"'.encode("latin-1"))
    (problem,) = problems_of(["--job.config_file", str(file)])
    assert problem.key == "job.config_file"
    assert "UTF-8" in problem.rule
    assert "byte 22" in problem.remedy


def test_a_comment_is_not_blamed_for_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("optimizer.lr = oops  # “lr”")
    (problem,) = problems_of(["--job.config_file", str(tmp_path / "bad.toml")])
    assert problem.remedy == "fix the file: Invalid value (at line 1, column 16)"


def test_misspelled_file_name_suggests_a_file_in_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").write_text("")
    (problem,) = problems_of(["--job.config_file", str(tmp_path / "quikstart.toml")])
    assert str(tmp_path / "quickstart.toml") in problem.remedy
    (tmp_path / "bin.toml").write_text("")
    (problem,) = problems_of(["--job.config_file", str(tmp_path / "missing.toml")])
    assert problem.remedy == "give the path of a TOML file"


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bom.toml"
    file.write_text("training.steps = 5", encoding="utf-8-sig")
    assert load_config(["--job.config_file", str(file)], world_size=1, device_type="cpu").training.steps == 5


def test_dump_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    real_access = os.access  # as root every folder is writable
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and real_access(path, mode))
    (problem,) = problems_of(["--job.dump_folder", str(locked / "runs" / "a")])
    assert problem.key == "job.dump_folder"
    assert str(locked) in problem.rule


def test_a_path_that_the_locale_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(ConfigError, match=r"(?s)tokenizer\.path = .*in this locale \(ascii\).*LC_ALL=C\.UTF-8"):
        load_config(["quickstart", "--tokenizer.path", "nö"], world_size=1, device_type="cpu")


def test_dump_folder_behind_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (problem,) = problems_of(["--job.dump_folder", str(tmp_path / "link")])
    assert "a folder; " in problem.rule


def test_all_problems_are_reported_together_and_once_each(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(
        """
        steps = 5
        [optimiser]
        lr = 1
        [optimizer]
        lr = -1
        beta1 = "0.9"
        beta2 = 2
        [training]
        stesp = 5
        steps = 0
        [data]
        shuffle = "false"
        [[data.sources]]
        kind = "txt"
        pth = "x"
        [model]
        flavor = "8b"
        [job]
        dump_folder = ""
        """
    )
    argv = ["--job.config_file", str(file), "word", "--metrics.log_freq", "--debug.seed", "1", "--debug.seed", "2"]
    found = problems_of([*argv, "--comm.init_timeout_s", "0", "--parallelism.tp", "0"])
    assert sorted(problem.key for problem in found) == sorted(
        [
            *("argument 'word'", "debug.seed", "steps", "optimiser", "metrics.log_freq", "job.dump_folder"),
            *("model.flavor", "data.shuffle", "data.sources.0.kind", "data.sources.0.pth", "training.stesp"),
            *("training.steps", "parallelism.tp", "optimizer.lr", "optimizer.beta1", "optimizer.beta2"),
            "comm.init_timeout_s",
        ]
    )
    report = str(ConfigError(found))
    assert report.startswith("the configuration has 17 problems:")
    assert all(problem.key in report and problem.remedy in report for problem in found)


GARBAGE = [
    *("", "0", "-1", "7", "1000000", "1e308", "-0.5", "nan", "true", "x", "[]", '["a", 1]', "{}", "\n", "1 2", "/"),
    "none",
]


@seeds(4, 100)
def test_garbage_is_always_reported_as_problems(seeds: range) -> None:
    """Several bad values at once, in any combination: each check handles arbitrary values of the other keys."""
    for seed in seeds:
        choose = random.Random(seed)
        family = list(FAMILIES)[seed % len(FAMILIES)]
        keys = full_keys(family)
        for _ in range(15):
            argv = [
                f"--model.family={family}",
                *(f"--{key}={choose.choice(GARBAGE)}" for key in choose.sample(keys, 6)),
            ]
            report = [str(problem) for problem in problems_of(argv, choose.choice([1, 2, 6]))]
            assert len(set(report)) == len(report), argv


def test_rules_that_use_an_unreadable_value_are_skipped() -> None:
    """tp = 2 fits the intended seq_len = 4096, but not the default used in its place."""
    argv = ["--parallelism.tp", "3", "--model.n_heads", "3", "--training.seq_len"]
    assert "training.seq_len" in [problem.key for problem in problems_of([*argv, "8"])]
    assert [problem.key for problem in problems_of([*argv, "x"]) if "seq_len" in problem.key] == ["training.seq_len"]


def test_unreadable_file_is_reported_without_rules_across_keys() -> None:
    found = problems_of(["--job.config_file", "/none.toml", "--training.stesp", "5", "--parallelism.tp", "3"])
    assert [problem.key for problem in found] == ["job.config_file", "training.stesp"]


def test_keys_with_a_problem_have_their_default() -> None:
    config, problems = parse_config(["--training.steps", "x", "--model.dim", "64.0", "--model.n_layers", "2"])
    assert [problem.key for problem in problems] == ["model.dim", "training.steps"]
    assert config.training.steps == 1000
    assert config.model.overrides == {"n_layers": 2}


@pytest.mark.timeout(30)
def test_a_configuration_from_a_pipe_is_refused(tmp_path: Path) -> None:
    """As in `titanlite train <(command)`; and named pipes without a writer, which would block, and devices."""
    reader, writer = os.pipe()
    os.mkfifo(tmp_path / "pipe.toml")
    for path, kind in ((f"/dev/fd/{reader}", "pipe"), (str(tmp_path / "pipe.toml"), "pipe"), ("/dev/zero", "device")):
        (problem,) = problems_of([path])
        assert (problem.key, problem.rule) == ("job.config_file", f"a TOML file; it is not a regular file but a {kind}")
        assert problem.remedy.startswith("save it as a file, and give the file's path")
    os.close(reader)
    os.close(writer)
    (tmp_path / "link.toml").symlink_to("nowhere")
    (problem,) = problems_of([str(tmp_path / "link.toml")])
    assert "did you mean" not in problem.remedy
