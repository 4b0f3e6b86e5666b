"""Samples: texts that the model writes during training."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from titanlite.data.tokenizer import Tokenizer
from titanlite.forward import ModelOnMesh
from titanlite.generation.config import SamplesConfig
from titanlite.generation.generate import Prompt, Sampling, TextStream, generate
from titanlite.generation.model import gather_model
from titanlite.metrics.loggers import Loggers
from titanlite.metrics.meter import Meter
from titanlite.metrics.records import SamplesRecord
from titanlite.models.family import Family, LanguageModel
from titanlite.ranks.agreement import run_on_rank_0
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log


@dataclass(frozen=True)
class Samples:
    """Samples of a run: interval, prompts and outputs. prompts: tokenized. dtype: of the computation.
    eos_ids: tokens that end a text.

    group: gloo group of all ranks, which wait in it while rank 0 generates.
    """

    section: SamplesConfig
    model: ModelOnMesh
    family: Family
    hyper_parameters: Any
    dtype: torch.dtype
    tokenizer: Tokenizer
    eos_ids: Collection[int]
    prompts: Sequence[Prompt]
    group: dist.ProcessGroup
    meter: Meter
    loggers: Loggers

    def is_due(self, step: int, last: bool) -> bool:
        """Whether to sample after `step`. last: whether it is the last step of the run."""
        return last or step % self.section.interval == 0

    def after_step(self, step: int) -> None:
        """Gather the weights on rank 0, generate there, and log the texts. A collective over all ranks.

        Changes neither weights nor random states. If the logits are not finite, a warning is logged instead.
        """
        model = self.model
        with self.meter.left_out():
            gathered = gather_model(model.model_parts, model.mesh, self.family, self.hyper_parameters, self.dtype)
            run_on_rank_0(lambda: self._write(step, gathered), self.group)

    def _write(self, step: int, model: LanguageModel | None) -> None:
        assert model is not None
        try:
            texts = self._texts(model)
        except UserError:
            log.warning("no samples after step %d: the model's logits are not finite", step)
            return
        given = [prompt.text for prompt in self.prompts]
        self.loggers.write(SamplesRecord(step, tuple(zip(given, texts, strict=True))))

    def _texts(self, model: LanguageModel) -> list[str]:
        """The continuation of each prompt."""
        section = self.section
        room = self.hyper_parameters.max_seq_len - max(len(prompt.ids) for prompt in self.prompts)
        streams = [TextStream(self.tokenizer, prompt.ids) for prompt in self.prompts]
        texts = [""] * len(streams)
        steps = generate(
            model,
            [prompt.ids for prompt in self.prompts],
            Sampling(section.temperature),
            max_new_tokens=min(section.max_new_tokens, room),
            eos_ids=self.eos_ids,
        )
        for tokens in steps:
            for row, token in enumerate(tokens):
                if token is not None and token not in self.eos_ids:
                    texts[row] += streams[row].add(token)
        return [text + stream.rest() for text, stream in zip(texts, streams, strict=True)]
