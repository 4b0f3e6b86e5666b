"""The promise that each row of the report confirms, and the file to look at if it fails."""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Promise:
    """A promise about a GPU. check, case: of its rows; case is a shell pattern, and the first promise that matches
    counts. file: relative to the repository."""

    check: str
    case: str
    text: str
    file: str


OF_FAMILIES = "steps of each model family have the gradients of float64"

PROMISES = (
    Promise("1", "*attention*", "attention runs on a fused kernel", "titanlite/models/attention.py"),
    Promise("1", "*", "the device is as fast as its data sheet says", "titanlite/runtime/peak_flops.py"),
    Promise("2", "experts*", "experts compute their own rows, and no others", "titanlite/models/experts.py"),
    Promise("2", "loss*", "the loss by chunks is that of all logits", "titanlite/models/head.py"),
    Promise("2", "Muon*", "Muon updates as in float64, and skips steps", "titanlite/optim/muon.py"),
    *(
        Promise("2", case, "AdamW, Lion and SGD update as in float64, and skip steps", "titanlite/optim/elementwise.py")
        for case in ("*AdamW*", "Lion*", "SGD*")
    ),
    Promise("2", "*", "layers compute their formulas", "titanlite/models/layers.py"),
    Promise("3", "*infinity*", "a step that overflows changes nothing", "titanlite/optim/optimizer.py"),
    Promise("3", "repeated*", "the same seed gives the same bits", "titanlite/runtime/determinism.py"),
    Promise("3", "*answers only", "only answers of conversations count", "titanlite/models/head.py"),
    Promise("3", "*compiled*", "compiled steps have the gradients of float64", "titanlite/parallel/compile.py"),
    Promise("3", "*recompute*", "recomputation changes no gradient", "titanlite/parallel/recompute.py"),
    *(
        Promise("3", f"{name},*", OF_FAMILIES, f"titanlite/models/{name}.py")
        for name in (
            "deepseek_v3",
            "gemma2",
            "gemma3",
            "gpt_oss",
            "llama3",
            "mistral",
            "qwen2",
            "qwen3",
            "qwen3_5",
            "qwen3_moe",
            "qwen3_next",
            "olmo2",
            "olmo3",
            "olmoe",
            "smollm3",
        )
    ),
    Promise("3", "qwen3_5_moe,*", OF_FAMILIES, "titanlite/models/qwen3_5.py"),
    Promise("3", "*", "steps have the gradients of float64", "titanlite/trainer.py"),
    Promise("4", "*graphs*", "blocks compile once, whatever the documents", "titanlite/parallel/compile.py"),
    Promise("4", "*", "a step never waits for the device", "titanlite/trainer.py"),
    Promise("5", "*", "a run resumes from its checkpoints, bit for bit", "titanlite/checkpoint/saver.py"),
    Promise("6", "bits*", "bit_equal: the bits of one process on a mesh", "titanlite/parallel/exact.py"),
    Promise("6", "dp_*", "data-parallel gradients are those of one process", "titanlite/parallel/data.py"),
    Promise("6", "tp*", "tensor-parallel gradients are those of one process", "titanlite/parallel/tensor.py"),
    Promise("6", "pp*", "pipeline gradients are those of one process", "titanlite/parallel/pipeline.py"),
    Promise("6", "cp*", "context-parallel gradients are those of one process", "titanlite/parallel/context.py"),
    Promise("6", "ep*", "expert-parallel gradients are those of one process", "titanlite/parallel/expert.py"),
    Promise("6", "8B*", "the plan's memory is that of the device", "titanlite/planning/rank_memory.py"),
    Promise("6", "*", "a step has the products of its formula, and no more", "titanlite/models/decoder.py"),
    Promise("7", "*", "titanlite is as fast as a loop by hand", "scripts/gpu_checks/benchmark.py"),
    Promise("8", "*", "the device is busy during a step", "titanlite/trainer.py"),
    Promise("9", "kernel of *", "no model's attention materializes its scores", "titanlite/models/attention.py"),
    Promise("9", "*", "attention is exact, on fused kernels that are compiled once", "titanlite/models/attention.py"),
    Promise("10", "no wait*", "no option lets a step wait for the device", "titanlite/trainer.py"),
    Promise("10", "one wrapped rank", "FSDP on NCCL has the gradients of float64", "titanlite/parallel/data.py"),
    Promise("10", "copies*", "a background save has the state of its step", "titanlite/checkpoint/state.py"),
    Promise("10", "bit_equal*", "bit_equal: the bits of a repetition", "titanlite/parallel/exact.py"),
    Promise("10", "*", "all models train and sample deterministically", "titanlite/runtime/determinism.py"),
    Promise("11", "a thread*", "heartbeats go on while the GPU hangs", "titanlite/ranks/positions.py"),
    Promise("11", "*", "NCCL's timeouts end a rank, with records", "titanlite/ranks/distributed.py"),
    Promise("12", "a save*", "a background save does not wait for the device", "titanlite/checkpoint/storage.py"),
    Promise("12", "*experts", "recomputation by op keeps the products of experts", "titanlite/parallel/recompute.py"),
    Promise("12", "a layer*", "the kernels of a layer with experts", "titanlite/models/experts.py"),
    Promise("12", "*", "the loss has the fastest chunks and sums", "titanlite/models/head.py"),
)


def promise_of(check: str, case: str) -> Promise:
    """The promise of a row. check: begins with its number."""
    number = check.partition(" ")[0]
    return next(each for each in PROMISES if number == each.check and fnmatchcase(case, each.case))
