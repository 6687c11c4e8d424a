# ruff: noqa: E501  (one case a line)
"""Every mistake is told with its line, its column and something that helps, and never with a traceback.

In the texts below `¶` stands just before the place that the message must name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.declare import CaseError, load_case

GOOD = """\
question: Does it hold?
paper: fishman2024
base: {model: llama-0.3m, tokens: 4k}
matrix:
  precision: [bf16, fp8-delayed]
  seed: [0, 1]
"""
CLAIM = "claims:\n  - {id: a, measure: final_loss_gap, of: {precision: fp8-delayed}, "
Q = "question: Why?\n"
RUN = Q + "base: {model: llama-0.3m, tokens: 4k, "
TINY = "num_layers: 2, d_model: 32, num_heads: 4, num_kv_heads: 2, d_ffn: 64"

WRONG: list[tuple[str, str, str]] = [
    # YAML
    ("duplicate key", Q + "base: {}\n¶question: Again?\n", "duplicate key 'question', first written on line 1"),
    ("duplicate nested key", Q + "base: {seed: 0, ¶seed: 1}\n", "duplicate key 'seed'"),
    ("tag", Q + "notes: ¶!!python/name:os.system ''\n", "tags are not used here"),
    ("unclosed list", Q + "matrix:\n  seed: [0, 1\n¶", "begun on line 3"),
    ("tab", Q + "base:\n¶\tseed: 0\n", "indent with spaces"),
    ("colon in text", "question: Does it hold¶: or not?\n", "quote text that contains a colon"),
    ("unknown alias", Q + "base: ¶*nobody\n", "alias *nobody names no value"),
    ("alias of itself", Q + "base: &b {data: ¶*b}\n", "names no value written above it"),
    ("two documents", Q + "¶---\nbase: {}\n", "a second document"),
    ("list as key", Q + "? ¶[a]\n: 1\n", "a key must be a plain word"),
    ("too deep", Q + "notes: " + "[" * 31 + "¶[" + "\n", "nested deeper than 32"),
    ("infinite", Q + "base: {optimizer.lr: ¶.inf}\n", "not a finite number"),
    ("huge number", Q + "base: {seed: ¶99999999999999999999}\n", "number out of range"),
    ("unprintable", Q + "notes: a¶\x07\n", "unprintable character"),
    ("empty file", "¶", "nothing is written here"),
    ("a list", "¶- question\n", "a case is a mapping"),
    ("a word", "¶hello\n", "(got 'hello')"),
    # the file's own keys
    ("no question", "¶base: {model: llama-0.3m, precision: bf16, tokens: 1k}\n", "question is missing"),
    ("empty question", "question: ¶''\nbase: {model: llama-0.3m, precision: bf16, tokens: 1k}\n", "must not be empty"),
    ("number as question", "question: ¶12\nbase: {model: llama-0.3m, precision: bf16, tokens: 1k}\n", "should be text (got 12)"),
    ("unknown key", GOOD + "¶clams: []\n", "did you mean 'claims'?"),
    ("base is text", Q + "base: ¶fast\n", "base: should be a mapping (got 'fast')"),
    ("matrix is a list", Q + "base: {model: llama-0.3m, precision: bf16, tokens: 1k}\nmatrix: ¶[seed]\n", "should be a mapping"),
    ("axis is no list", RUN + "precision: bf16, }\nmatrix: {seed: ¶3}\n", "should be a list (got 3)"),
    ("empty axis", RUN + "precision: bf16, }\nmatrix: {seed: ¶[]}\n", "must not be empty"),
    ("include is a mapping", GOOD + "include: ¶{seed: 3}\n", "should be a list"),
    ("probe period", GOOD + "probes: {loss: ¶-1}\n", "must be at least 0 (got -1)"),
    ("unknown probe", GOOD + "probes: {¶gradient: 1}\n", "did you mean 'gradients'?"),
    ("unknown task", GOOD + "task: ¶pretrian\n", "did you mean 'pretrain'?"),
    ("unknown paper", Q + "paper: ¶fishmann2024\nbase: {model: llama-0.3m, precision: bf16, tokens: 1k}\n", "did you mean 'fishman2024'"),
    ("second paper unknown", RUN + "precision: bf16, }\npaper: [fishman2024, ¶tweo]\n", "suite list papers"),
    ("extends nothing", GOOD + "extends: ¶nothing\n", "no file beside this one"),
    ("extends a list", GOOD + "extends: ¶[a]\n", "should name a case"),
    ("size is a word", GOOD + "sizes: {laptop: ¶small}\n", "should be a mapping"),
    # fields of a run
    ("unknown field", RUN + "precision: bf16, ¶sed: 1}\n", "did you mean 'seed'?"),
    ("unknown nested field", RUN + "precision: bf16, optimizer: {¶learning_rate: 1}}\n", "unknown key 'learning_rate' in optimizer"),
    ("unknown dotted field", RUN + "precision: bf16, ¶model.fnn: gelu}\n", "did you mean 'ffn'?"),
    ("unknown model", Q + "base: {model: ¶llama-1, precision: bf16, tokens: 1k}\n", "did you mean 'llama-1m'?"),
    ("unknown precision", RUN + "precision: ¶fp8}\n", "suite list precisions"),
    ("unknown optimizer", RUN + "precision: bf16, optimizer: ¶adam}\n", "did you mean 'adamw'?"),
    ("unknown parallelism", RUN + "precision: bf16, parallelism: ¶fsdp}\n", "allowed: single"),
    ("unknown ageing", RUN + "precision: bf16, ageing: ¶stattic-12}\n", "static-K"),
    ("ageing pattern itself", RUN + "precision: bf16, ageing: ¶static-K}\n", "K stands for a whole number"),
    ("ageing too far", RUN + "precision: bf16, ageing: ¶static-41}\n", "must be at most 40 (got 41)"),
    ("ageing a number", RUN + "precision: bf16, ageing: ¶12}\n", "should be the name of a preset, or a mapping"),
    ("unknown preset in mapping", RUN + "precision: {preset: ¶bf61}}\n", "did you mean 'bf16'?"),
    ("preset is a list", RUN + "precision: {preset: ¶[bf16]}}\n", "should be a name"),
    ("no model", Q + "¶base: {tokens: 1k, precision: bf16}\n", "model is missing"),
    ("no tokens", Q + "¶base: {model: llama-0.3m, precision: bf16}\n", "tokens is missing"),
    ("no precision", Q + "¶base: {model: llama-0.3m, tokens: 1k}\n", "precision is missing"),
    ("no tokens at a size", Q + "base: {model: llama-0.3m, precision: fp32}\nsizes:\n  ¶laptop: {}\n", "tokens is missing"),
    ("tokens lots", RUN.replace("4k", "¶lots") + "precision: bf16}\n", "a quantity such as 400k"),
    ("tokens in part", RUN.replace("4k", "¶1.5") + "precision: bf16}\n", "80GiB (got 1.5)"),
    ("tokens too many", RUN.replace("4k", "¶99999999999T") + "precision: bf16}\n", "a quantity such as"),
    ("seed no", RUN + "precision: bf16, seed: ¶no}\n", "(got 'no')"),
    ("seed true", RUN + "precision: bf16, seed: ¶true}\n", "should be a whole number"),
    ("compile on", RUN + "precision: bf16, model.qk_norm: ¶on}\n", "should be true or false (got 'on')"),
    ("negative seed", RUN + "precision: bf16, seed: ¶-1}\n", "must be at least 0 (got -1)"),
    ("rate of zero", RUN + "precision: bf16, optimizer.lr: ¶0}\n", "must be above 0 (got 0)"),
    ("beta of one", RUN + "precision: bf16, optimizer: {beta2: ¶1}}\n", "must be below 1 (got 1)"),
    ("unknown device", RUN + "precision: bf16, device: ¶gpu}\n", "allowed: cpu, cuda"),
    ("unknown feed-forward", RUN + "precision: bf16, model.ffn: ¶swiglue}\n", "did you mean 'swiglu'?"),
    ("unknown format", RUN + "precision: {preset: fp8-current, recipe: {weights: {format: ¶e9m4}}}}\n", "unknown format 'e9m4'; known: fp32"),
    ("transform of one operand", RUN + "precision: {name: mine, recipe: ¶{weights: {format: e4m3, hadamard: 16}}}}\n", "must be on both operands or on none"),
    ("cast in training", RUN + "precision: bf16, ¶cast: mxfp8}\n", "cast: nothing that task pretrain reads"),
    ("no tokens at all", RUN.replace("4k", "¶0") + "precision: bf16}\n", "must be at least 1 (got 0)"),
    ("heads do not divide", Q + f"base: {{model: ¶{{name: t, {TINY.replace('heads: 4', 'heads: 3', 1)}}}, tokens: 1k, precision: fp32}}\n", "does not divide d_model 32"),
    ("unknown tokenizer", RUN + "precision: bf16, data: {tokenizer: ¶bpe-12}}\n", "N >= 320"),
    ("probes a list", RUN + "precision: bf16, probes: ¶[loss]}\n", "should be a mapping"),
    ("memory of words", RUN + "precision: bf16, limits: {memory_bytes: ¶80Gi}}\n", "80GiB"),
    ("start_from in base", RUN + "precision: bf16, ¶start_from: {seed: 3}}\n", "write start_from at the top"),
    ("sequence too long", RUN + "precision: bf16, seq_len: ¶4096}\n", "above max_seq_len"),
    # meshes
    ("tp and heads", RUN + "precision: bf16, parallelism: ¶{tp: 2}}\n", "tp 2 does not divide num_heads 3 of llama-0.3m; tp 2 does not divide num_kv_heads 3 of llama-0.3m; nearest of 2 ranks: {dp: 2}"),
    ("tp and key heads", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, parallelism: ¶{tp: 4}}\n", "tp 4 does not divide num_kv_heads 2 of llama-0.8m; nearest of 4 ranks: {dp: 2, tp: 2}"),
    ("tp and width", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, model.d_ffn: 255, parallelism: ¶{tp: 2}}\n", "tp 2 does not divide d_ffn 255"),
    ("tp and vocabulary", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, data.tokenizer: bpe-321, parallelism: ¶{tp: 2}}\n", "tp 2 does not divide vocab_size 321 of tokenizer bpe-321"),
    ("pp and layers", RUN + "precision: bf16, parallelism: ¶{pp: 4}}\n", "pp 4 is more than num_layers 2 of llama-0.3m; nearest of 4 ranks: {dp: 2, pp: 2}"),
    ("stages and layers", RUN + "precision: bf16, parallelism: ¶{pp: 2, schedule: interleaved}}\n", "pp 2 with 2 stages a rank makes 4 stages, which is more than num_layers 2 of llama-0.3m; nearest of 2 ranks: {pp: 2}"),
    ("three stages in a V", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, parallelism: ¶{pp: 2, schedule: zbv, stages_per_rank: 1}}\n", "zbv is laid in a V, two stages a rank; got stages_per_rank 1; nearest of 2 ranks: {pp: 2, schedule: zbv}"),
    ("one stage interleaved", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, parallelism: ¶{pp: 2, schedule: interleaved, stages_per_rank: 1}}\n", "interleaved needs at least two stages a rank, got 1; nearest of 2 ranks: {pp: 2, schedule: interleaved}"),
    ("two stages of 1F1B", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, parallelism: ¶{pp: 2, stages_per_rank: 2}}\n", "1f1b takes one stage a rank, got 2; schedules for several are interleaved, zbv, dualpipev; nearest of 2 ranks: {pp: 2}"),
    ("rounds of microbatches", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, batch_size: 10, parallelism: ¶{pp: 2, schedule: interleaved, microbatches: 5}}\n", "interleaved runs 5 microbatches on 2 ranks in 2 rounds, which must be equal; 4 or 6 microbatches would do; nearest of 2 ranks: {pp: 2, schedule: interleaved, microbatches: 10}"),
    ("too few microbatches", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, parallelism: ¶{pp: 2, schedule: dualpipev, microbatches: 2}}\n", "dualpipev needs at least as many microbatches as stages, got 2 for 4; nearest of 2 ranks: {pp: 2, schedule: dualpipev}"),
    ("batch of many parts", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, accumulation: 4, parallelism: ¶{dp: 4, pp: 2}}\n", "batch_size 8 is no multiple of 64 = dp 4 · accumulation 4 · microbatches (twice pp) 4; nearest of 8 ranks: {dp: 2"),
    ("dp and batch", RUN + "precision: bf16, parallelism: ¶{dp: 3}}\n", "dp 3 does not divide batch_size 8; no mesh of 3 ranks is possible"),
    ("accumulation and batch", RUN + "precision: bf16, accumulation: ¶3}\n", "accumulation 3 does not divide batch_size 8"),
    ("fault on no rank", RUN + "precision: bf16, parallelism: ddp-2, fault: ¶{kind: kill, rank: 2}}\n", "fault.rank is 2, and the run has 2 ranks; the first is 0"),
    ("native cp on a CPU", RUN + "precision: bf16, seq_len: 64, parallelism: ¶{cp: 2, context: native}}\n", "no kernels for a CPU"),
    ("cp and sequence", RUN + "precision: bf16, parallelism: ¶{cp: 3}}\n", "no multiple of 6"),
    ("cp and kept scores", RUN + "precision: bf16, attention.kernel: eager, parallelism: ¶{cp: 2}}\n", "attention kernel eager keeps it whole; nearest of 2 ranks: {dp: 2}"),
    ("pp and tied weights", RUN + "precision: bf16, model.tie_embeddings: true, parallelism: ¶{pp: 2}}\n", "and they are tied; nearest of 2 ranks: {dp: 2}"),
    ("split backward and full recomputation", Q + "base: {model: llama-0.8m, tokens: 4k, precision: bf16, recompute: full, parallelism: ¶{pp: 2, schedule: zero-bubble}}\n", "computes a stage's layers anew for each group of its weights; selective or none do; nearest of 2 ranks: {pp: 2}"),
    ("experts of a dense model", RUN + "precision: bf16, parallelism: ¶{ep: 2}}\n", "no experts to share out; nearest of 2 ranks: {dp: 2}"),
    ("experts of another number", RUN + "precision: bf16, model.moe: {experts: 6}, batch_size: 16, parallelism: ¶{ep: 4}}\n", "ep 4 does not divide the 6 experts of llama-0.3m; nearest of 4 ranks: {dp: 2, ep: 2}"),
    ("another number of ranks", RUN + "precision: bf16, parallelism: ¶{dp: 2, pp: 2, ranks: 8}}\n", "dp 2 · pp 2 makes 4 ranks, not 8; nearest of 8 ranks: {dp: 4, pp: 2, microbatches: 2}"),
    ("nothing to shard", RUN + "precision: bf16, parallelism: ¶{tp: 2, zero: 3}}\n", "zero 3 shards over dp, ep and cp, and they have one rank between them; nearest of 2 ranks: "),
    ("replicas of DDP", RUN + "precision: bf16, parallelism: ¶{dp: 4, replicas: 2}}\n", "replicas 2 (HSDP) needs zero 2 or 3 and a dp that it divides, got zero 0, dp 4; nearest of 4 ranks: {dp: 4}"),
    ("replicas that do not divide", RUN + "precision: bf16, parallelism: ¶{dp: 4, zero: 3, replicas: 3}}\n", "nearest of 4 ranks: {dp: 4, zero: 3}"),
    ("sequence parallel without tp", RUN + "precision: bf16, parallelism: ¶{dp: 2, sequence_parallel: true}}\n", "it needs tp of at least 2; nearest of 2 ranks: {dp: 2}"),
    ("pipeline study without one", Q + "task: pipeline\nbase: {parallelism: ¶ddp-2}\n", "task pipeline needs a parallelism with pp of at least 2"),
    ("pipeline study of three stages", Q + "task: pipeline\nbase: {parallelism: ¶{pp: 2, schedule: zbv, stages_per_rank: 3}}\n", "zbv is laid in a V, two stages a rank; got stages_per_rank 3; nearest of 2 ranks: {pp: 2, schedule: zbv}"),
    ("pipeline study of two axes", Q + "task: pipeline\nbase: {parallelism: ¶{dp: 2, pp: 2}}\n", "task pipeline lays its stages along pp alone, got dp 2 · pp 2; nearest of 4 ranks: {pp: 4}"),
    ("step without a model", Q + "task: step\n¶base: {precision: bf16}\n", "task step needs a model"),
    ("trace on an impossible mesh", Q + "task: trace\nbase: {model: llama-0.3m, precision: bf16, parallelism: ¶{tp: 2}}\n", "tp 2 does not divide num_heads 3"),
    ("zero stage", RUN + "precision: bf16, parallelism: {zero: ¶4}}\n", "must be at most 3 (got 4)"),
    # axes, include, exclude, start_from
    ("axis of nothing", GOOD + "  ¶sede: [0]\n", "did you mean 'seed'?"),
    ("axis value", GOOD + "  ageing: [none, ¶sporadic]\n", "unknown preset (got 'sporadic')"),
    ("axis value of a field", GOOD + "  model.ffn: [swiglu, ¶relu]\n", "unknown value (got 'relu')"),
    ("list in an axis", GOOD + "  batch_size: [¶[8]]\n", "a value cannot be a list"),
    ("mapping without a name", GOOD + "  optimizer: [¶{lr: 1e-3}]\n", "a mapping needs a `label`"),
    ("two values of one name", GOOD + "  optimizer: [{label: x, lr: 1e-3}, ¶{label: x, lr: 1e-2}]\n", "two different values"),
    ("axis start_from", GOOD + "  ¶start_from: [null]\n", "is set by the plan"),
    ("axis in a size", GOOD + "sizes:\n  laptop: {matrix: {precision: [¶fp17]}}\n", "did you mean 'fp16'?"),
    ("matrix too large", RUN + "}\nmatrix: ¶{precision: [bf16], " + ", ".join(f"{a}: [{', '.join(map(str, range(1, 30)))}]" for a in ("seed", "batch_size", "threads")) + "}\n", "the limit is 5,000"),
    ("include of nothing", GOOD + "include:\n  - {precision: bf16, ¶sede: 4}\n", "did you mean 'seed'?"),
    ("include without precision", Q + "base: {model: llama-0.3m, tokens: 4k}\nmatrix: {precision: [bf16]}\ninclude:\n  - ¶{seed: 1}\n", "precision is missing"),
    ("exclude another label", GOOD + "exclude: [{¶ageing: none}]\n", "no run has a label 'ageing'"),
    ("exclude another value", GOOD + "exclude: [{seed: ¶7}]\n", "no run has this value (got 7); allowed: 0, 1"),
    ("start_from a name", GOOD + "start_from: ¶base\n", "should be a mapping"),
    ("start_from a wrong field", GOOD + "start_from: {¶toknes: 1k, precision: bf16}\n", "did you mean 'tokens'?"),
    ("start_from without precision", GOOD + "start_from: ¶{tokens: 1k}\n", "precision is missing"),
    ("start_from another shape", GOOD + "  model: [llama-0.3m, llama-1m]\nstart_from: ¶{precision: bf16}\n", "do not fit every run: model.num_layers is"),
    ("start_from other tokens", GOOD + "start_from: ¶{precision: bf16, data: {tokenizer: bpe-512}}\n", "data.tokenizer is bytes here and bpe-512 in the base"),
    ("start_from another feed-forward", GOOD + "  model.ffn: [swiglu, gelu]\nstart_from: ¶{precision: bf16}\n", "model.ffn is gelu here and swiglu in the base"),
    ("include without values", GOOD + "include: [{precision: bf16, seed: ¶[]}]\n", "seed has no values"),
    ("optimizer by name", GOOD + "  optimizer: [adamw, ¶{name: fast, lr: 1e-2}]\n", "its `name` is the algorithm"),
    ("override of a size", GOOD + "sizes: {laptop: {tokens: ¶-5}}\n", "must be at least 1 (got -5)"),
    # claims
    ("claim without rule", GOOD + CLAIM + "against: {precision: bf16}, ¶expects: {above: 1}}\n", "did you mean 'expect'?"),
    ("claim without measure", GOOD + "claims:\n  - ¶{id: a, expect: {above: 1}}\n", "measure is missing"),
    ("two rules", GOOD + CLAIM + "against: {precision: bf16}, expect: ¶{above: 1, below: 2}}\n", "exactly one rule is needed (got above, below)"),
    ("no rule", GOOD + CLAIM + "against: {precision: bf16}, expect: ¶{}}\n", "(got none)"),
    ("rule of another name", GOOD + CLAIM + "against: {precision: bf16}, expect: {¶atleast: 1}}\n", "did you mean 'at_least'?"),
    ("rule of words", GOOD + CLAIM + "against: {precision: bf16}, expect: {above: ¶much}}\n", "should be a number (got 'much')"),
    ("within upside down", GOOD + CLAIM + "against: {precision: bf16}, expect: ¶{within: [2, 1]}}\n", "within takes [low, high]"),
    ("margin of zero", GOOD + CLAIM + "against: {precision: bf16}, expect: {non_inferior_within: ¶0}}\n", "must be above 0"),
    ("needs magic", GOOD + CLAIM + "against: {precision: bf16}, needs: ¶gpu, expect: {above: 1}}\n", "allowed: native"),
    ("unknown provenance", GOOD + CLAIM + "against: {precision: bf16}, paper: {says: x, provenance: ¶heard}, expect: {above: 1}}\n", "allowed: read, secondary, recalled, derived"),
    ("claim of another paper", GOOD + CLAIM + "against: {precision: bf16}, paper: {says: x, key: ¶tweo}, expect: {above: 1}}\n", "unknown key (got 'tweo')"),
    ("claim of no label", GOOD + CLAIM + "against: {¶precison: bf16}, expect: {above: 1}}\n", "did you mean 'precision'?"),
    ("claim of no value", GOOD + CLAIM + "against: {precision: ¶bf61}, expect: {above: 1}}\n", "did you mean 'bf16'?"),
    ("claim of no run", GOOD + "exclude: [{precision: bf16, seed: 1}]\n" + CLAIM + "against: ¶{precision: bf16, seed: 1}, expect: {above: 1}}\n", "selects no run of this case at any size"),
    ("unknown measure", GOOD + "claims:\n  - {id: a, measure: ¶final_los, expect: {above: 1}}\n", "'final_loss'"),
    ("gap of nothing", GOOD + "claims:\n  - {id: a, measure: ¶final_loss_gap, expect: {above: 1}}\n", "`against` is missing"),
    ("against without a gap", GOOD + "claims:\n  - {id: a, measure: ¶final_loss, against: {seed: 1}, expect: {above: 1}}\n", "write final_loss_gap"),
    ("against without a gap, scoped", GOOD + "claims:\n  - {id: a, measure: ¶'peak_bytes[total]', against: {seed: 1}, expect: {above: 1}}\n", "write peak_bytes_gap[total] or peak_bytes_ratio[total]"),
    ("points of a statistic", GOOD + "claims:\n  - {id: a, measure: ¶final_loss_worst_error, against: {seed: 1}, expect: {at_most: 1}}\n", "write loss_worst_error"),
    ("fit of no field", GOOD + "claims:\n  - {id: a, measure: final_loss, fit: [¶seq_length], expect: {above: 1}}\n", "is no number among a run's fields"),
    ("fit of an expression", GOOD + "claims:\n  - {id: a, measure: final_loss, fit: [seq_len, ¶seq_len + 1], expect: {above: 1}}\n", "is no product of fields"),
    ("fit of two sides", GOOD + CLAIM + "against: {precision: bf16}, fit: ¶[seq_len], expect: {above: 1}}\n", "leave `against` away"),
    ("claim id twice", GOOD + CLAIM + "against: {precision: bf16}, expect: {above: 1}}\n  - {id: ¶a, measure: final_loss, expect: {above: 1}}\n", "used twice, first on line 8"),
    ("claim id with spaces", GOOD + "claims:\n  - {id: ¶a b, measure: final_loss, expect: {above: 1}}\n", "letters, digits"),
]  # fmt: skip


def test_there_are_enough() -> None:
    assert len(WRONG) >= 60
    assert len({name for name, _, _ in WRONG}) == len(WRONG)


@pytest.mark.parametrize(
    ("text", "fragment"), [entry[1:] for entry in WRONG], ids=[entry[0] for entry in WRONG]
)
def test_wrong_case(tmp_path: Path, text: str, fragment: str) -> None:
    before, after = text.split("¶")
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    path = tmp_path / "case.yaml"
    path.write_text(before + after)
    with pytest.raises(CaseError) as caught:
        load_case(path)
    message = str(caught.value)
    assert f"case.yaml:{line}:{column}: " in message, message
    told = [str(each) for each in caught.value.problems if (each.line, each.column) == (line, column)]
    assert any(fragment in each for each in told) or fragment in message.splitlines()[-1], message
    assert len(caught.value.problems) == 1, message
    assert "Traceback" not in message


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(
        "question: Why?\n"
        "base: {model: llama-9, tokens: lots, sed: 1}\n"
        "matrix: {precision: [bf16, fp9]}\n"
        "claims:\n"
        "  - {id: a, measure: final_loss, expect: {abov: 1}}\n"
    )
    with pytest.raises(CaseError) as caught:
        load_case(path)
    lines = str(caught.value).splitlines()
    assert [problem.line for problem in caught.value.problems] == [2, 2, 2, 3, 5]
    assert lines[-1].startswith("To see what is allowed: ")
    assert "suite list models" in lines[-1] and "suite list precisions" in lines[-1]


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("optimizer.lr", "should be PATH=VALUE"),
        ("=3", "should be PATH=VALUE"),
        ("optimizer..lr=3", "should be PATH=VALUE"),
        ("optimizer.lrr=1e-3", "did you mean 'lr'?"),
        ("optimizer.lr=fast", "should be a number (got 'fast')"),
        ("optimizer.lr=[1", "not valid YAML"),
        ("precision=fp9", "unknown preset (got 'fp9')"),
        ("seed=[0, x]", "seed: should be a whole number"),
        ("matrix.sede=[1]", "unknown key 'sede'"),
        ("parallelism.tp=2", "impossible mesh"),
        ("parallelism.ranks=2", "the mesh makes 1 rank, not 2; nearest of 2 ranks: {dp: 2}"),
        ("notes=!!str x", "tags are not used here"),
        ("start_from.tokens=-1", "must be at least 1"),
    ],
)
def test_wrong_override(tmp_path: Path, override: str, fragment: str) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(GOOD + "start_from: {precision: bf16}\n")
    with pytest.raises(CaseError) as caught:
        load_case(path, [override])
    assert str(caught.value).startswith(f"--set {override}: ")
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("no_such_case", "no such case file or built-in case"),
        ("some/where/case.yaml", "no such case file"),
        ("", "is a folder"),
        ("a\0b", "no such case file"),
        ("x" * 5000, "no such case file"),
    ],
)
def test_wrong_name(name: str, fragment: str) -> None:
    with pytest.raises(CaseError, match=fragment):
        load_case(name)


def test_a_binary_file_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    path.write_bytes(b"question: why\nbase: \xff\n")
    with pytest.raises(CaseError, match=r"case\.yaml:2:7: not UTF-8 text \(byte 0xff\)"):
        load_case(path)


def test_a_mistake_in_the_extended_case_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("question: Why?\nbase: {model: llama-0.3m, tokens: lots}\n")
    (tmp_path / "child.yaml").write_text("extends: parent\nmatrix: {precision: [bf16, fp9]}\n")
    with pytest.raises(CaseError) as caught:
        load_case(tmp_path / "child.yaml")
    places = [(Path(problem.file).name, problem.line) for problem in caught.value.problems]
    assert places == [("child.yaml", 2), ("parent.yaml", 2)]


def test_one_level_of_extends(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "b.yaml").write_text("extends: a\n")
    (tmp_path / "c.yaml").write_text("extends: b\n")
    assert load_case(tmp_path / "b.yaml").question == "Does it hold?"
    with pytest.raises(CaseError, match=r"c\.yaml:1:10: extends: .* one level is allowed"):
        load_case(tmp_path / "c.yaml")
