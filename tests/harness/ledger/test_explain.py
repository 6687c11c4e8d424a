"""Terms as they are printed: each formula gives its number, and what is alike stands in one line."""

import math
import re

import pytest

from harness.ledger.predict import explain
from harness.ledger.states import states
from harness.spec import ModelSpec, ParallelismSpec, RunSpec
from suite.declare import presets


def spec_of(model="llama-0.8m", precision="bf16", recompute="none", moe=None, **mesh):
    model = model if isinstance(model, ModelSpec) else presets("models")[model]
    return RunSpec.model_validate(
        {
            "task": "ledger",
            "model": model.model_dump() | ({"moe": moe} if moe else {}),
            "precision": presets("precisions")[precision],
            "parallelism": ParallelismSpec(name="custom", **mesh),
            "recompute": recompute,
            "batch_size": 64,
            "seq_len": 64,
        }
    )


def product_of(numbers):
    """`12 (of 24) · 4` -> 48; `3 · (4 · 2)` -> 24."""
    counted = re.sub(r" \(of [\d,]+\)", "", numbers)
    assert re.fullmatch(r"[\d,·() ]+", counted), numbers
    return math.prod(int(each.replace(",", "")) for each in re.findall(r"[\d,]+", counted))


MIXTURE = {"experts": 8, "top_k": 2}
SPECS = {
    "plain": spec_of(),
    "full": spec_of(recompute="full"),
    "recipe": spec_of(precision="mxfp8"),
    "recipe, full": spec_of(precision="mxfp8", recompute="full"),
    "uneven shards": spec_of(dp=3, zero=3),
    "experts": spec_of(moe=MIXTURE),
    "experts, ddp": spec_of(moe=MIXTURE, dp=2, ep=2),
    "experts, sharded": spec_of(moe=MIXTURE, dp=4, ep=8, zero=3),
    "experts, whole": spec_of(moe=MIXTURE, ep=2, zero=2),
    "main gradients": spec_of(precision="bf16-main-gradients", dp=2),
}


@pytest.mark.parametrize("name", SPECS)
def test_each_formula_gives_its_number(name):
    spec = SPECS[name]
    terms = [term for term in explain(spec, 272) if term.category in ("weights", "gradients", "activations")]
    for term in terms:
        if "quantis" not in term.name and term.name != "buffers":
            assert product_of(term.numbers) == term.num_bytes, term
    found = states(spec, 272)
    for category in ("weights", "gradients"):
        printed = sum(term.num_bytes for term in terms if term.category == category)
        assert printed == getattr(found, category)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_alike_is_one_line(name):
    lines = [(term.name, term.numbers) for term in explain(SPECS[name], 272)]
    assert len(set(lines)) == len(lines)


def test_full_recomputation_keeps_one_line_a_layer_count():
    for name in ("full", "recipe, full"):
        (line,) = [term for term in explain(SPECS[name], 272) if term.name == "layer input"]
        assert line.formula.startswith("L · ")
        assert line.numbers.startswith(f"{SPECS[name].model.num_layers} · ")


def test_experts_are_divided_by_their_own_ranks():
    formulas = {term.name: term.formula for term in explain(SPECS["experts, sharded"], 272)}
    assert formulas["parameters of dense layers"] == "N_dense / 32, padded · b_w"
    assert formulas["parameters of experts"] == "N_experts / 4, padded · b_w"
    assert formulas["gradients of experts"] == "N_experts / 4, padded · b_g"
