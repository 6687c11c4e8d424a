"""Step time, tokens per second, model FLOP rate and MFU.

Step time is the mean of the steps since the last record, without the probes' own time; steps in which a
probe worked inside the model are left out where there are others. FLOPs are those the model needs (6 N + 12
L H Q T a token, PaLM's appendix B), whatever the hardware did; MFU sets them against the dense BF16 peak,
also for runs in another precision.
"""

from __future__ import annotations

from harness.data.vocabulary import vocab_size
from harness.ledger.flops import train_flops_per_token
from harness.probes.base import Probe, StepValues
from harness.probes.peaks import dense_bf16_peak


class Throughput(Probe):
    name = "throughput"

    def begin(self) -> None:
        spec = self.run.spec
        self._tokens = spec.batch_size * spec.seq_len
        self._flops = self._tokens * train_flops_per_token(
            spec.model, spec.seq_len, vocab_size(spec.data.tokenizer)
        )
        peak, source = dense_bf16_peak(self.run.device)
        self._peak = None if peak is None else peak * spec.parallelism.num_ranks
        self.run.record.note("mfu", self._peak, source)

    def after_step(self, step: int, values: StepValues) -> None:
        seconds = sum(self.run.step_seconds) / len(self.run.step_seconds)
        self.run.step_seconds.clear()
        rate = self._flops / seconds
        self.run.record.measure(
            step,
            {
                "step_ms": 1000 * seconds,
                "tokens_per_s": self._tokens / seconds,
                "model_flops_per_s": rate,
                "mfu": None if self._peak is None else rate / self._peak,
            },
        )
